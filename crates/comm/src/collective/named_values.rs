//! Enums whose values have names.

/// Declares an enum with a name for each value.
macro_rules! named_values {
    (
        $(#[doc = $doc:literal])+
        pub enum $type:ident {
            $( $(#[doc = $value_doc:literal])+ $value:ident = $name:literal, )+
        }
    ) => {
        $(#[doc = $doc])+
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum $type {
            $( $(#[doc = $value_doc])+ $value, )+
        }

        impl $type {
            /// All of them in order.
            pub const ALL: [$type; [$($name),+].len()] = [$($type::$value),+];

            /// Its name, for messages and traces.
            pub fn name(self) -> &'static str {
                match self { $($type::$value => $name,)+ }
            }
        }
    };
}

pub(super) use named_values;

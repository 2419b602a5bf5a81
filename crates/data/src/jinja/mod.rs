//! Jinja as transformers runs it (Jinja2 3.1.6 in an immutable sandbox), on top of minijinja.
//!
//! minijinja runs the statements of a template. Its expressions differ from Python's. This module
//! replaces them in three ways: filters, tests and globals of the same names; the methods of
//! Python's types; and, without a hook in minijinja, calls that [`rewrite`] writes into the
//! template before parsing.
//!
//! Limits: an int of more than 128 bits is an error. A macro parameter that gets an undefined value
//! takes its default. `break` and `continue` within `with`, `set` and `filter` blocks of a loop are
//! refused. Texts marked as `safe` do not escape text that is added to them. A chain of comparisons
//! does not raise. Generators are computed at once. An empty namespace is false. Views and
//! generators have indices. Generators and functions print no address. `urlize`, `random`,
//! `lipsum`, `str.encode` and long values in `pprint` are refused.

mod attributes;
mod characters;
mod edits;
mod format_spec;
mod globals;
mod html_filters;
mod literals;
mod macro_traits;
mod marks;
mod method_names;
mod methods;
mod number_filters;
mod objects;
mod operators;
mod predicates;
mod print;
mod printf;
mod rewrite;
mod rewrite_expression;
mod rewrite_macro;
mod sequence_filters;
mod sorting;
mod str_format;
mod str_methods;
mod tags;
mod text_filters;
mod tojson;
mod values;
mod wrapping;

use minijinja::value::{Rest, Value, ValueOrKwargs};
use minijinja::{AutoEscape, Environment, Error, State};

use globals::{DictClass, ItemCycler, ItemJoiner};
pub(super) use html_filters::html_text;
pub(super) use marks::{GENERATION_MARKS, mark_generation};
pub(super) use rewrite::rewrite;
pub(super) use tojson::{json_text, to_template};
use values::fault;

/// A function of Jinja or Python; it gets minijinja's arguments, keywords last.
type Builtin = fn(&mut State<'_, '_>, &[Value]) -> Result<Value, Error>;

/// A test of Jinja.
type Predicate = fn(&mut State<'_, '_>, &[Value]) -> Result<bool, Error>;

fn callable(
    function: Builtin,
) -> impl Fn(&mut State<'_, '_>, Rest<ValueOrKwargs>) -> Result<Value, Error> + Send + Sync + 'static {
    move |state: &mut State<'_, '_>, args: Rest<ValueOrKwargs>| function(state, &args.into_values())
}

/// Makes an environment with all that templates may use, except for values that depend on the run.
pub(super) fn environment() -> Environment<'static> {
    let mut env = Environment::new();
    // Jinja2 does not have these.
    for name in ["split", "lines", "bool", "chain", "zip"] {
        env.remove_filter(name);
    }
    for name in ["startingwith", "endingwith", "int", "safe"] {
        env.remove_test(name);
    }
    env.remove_global("debug");
    env.set_formatter(|out, state, value| {
        let written = match value.as_str() {
            // In a block of `autoescape`.
            _ if !matches!(state.auto_escape(), AutoEscape::None) && !value.is_safe() => {
                out.write_str(&html_filters::escaped(value)?)
            }
            Some(text) => out.write_str(text),
            None => out.write_str(&print::string(value)?),
        };
        written.map_err(|_| Error::from(minijinja::ErrorKind::WriteFailure))
    });
    env.set_unknown_method_callback(|_, value, name, args| methods::call_method(value, name, args));
    operators::add(&mut env);
    let groups: [&[(&str, Builtin)]; 4] = [
        &text_filters::FILTERS,
        &html_filters::FILTERS,
        &number_filters::FILTERS,
        &sequence_filters::FILTERS,
    ];
    for (name, filter) in groups.into_iter().flatten() {
        env.add_filter(*name, callable(*filter));
    }
    for (name, test) in predicates::TESTS {
        env.add_test(name, move |state: &mut State<'_, '_>, args: Rest<ValueOrKwargs>| {
            test(state, &args.into_values())
        });
    }
    env.add_global("dict", Value::from_dyn_object(std::sync::Arc::new(DictClass)));
    env.add_function("range", callable(|_, args| globals::range(args)));
    env.add_function("cycler", callable(|_, args| ItemCycler::from_arguments(args)));
    env.add_function("joiner", callable(|_, args| ItemJoiner::from_arguments(args)));
    env.add_function("namespace", callable(globals::namespace));
    env.add_function("lipsum", callable(|_, _| Err(fault("lipsum is not available"))));
    env.add_function(
        "raise_exception",
        callable(|_, args| match args.first() {
            Some(message) => Err(fault(print::string(message)?)),
            None => Err(fault("raise_exception() is missing its message")),
        }),
    );
    env
}

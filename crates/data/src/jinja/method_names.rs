//! The names of the methods of Python's types.

use super::values::PythonType;

const DICT_METHODS: [(&str, bool); 11] = [
    ("copy", true),
    ("fromkeys", true),
    ("get", true),
    ("items", true),
    ("keys", true),
    ("values", true),
    ("clear", false),
    ("pop", false),
    ("popitem", false),
    ("setdefault", false),
    ("update", false),
];

const LIST_METHODS: [(&str, bool); 11] = [
    ("copy", true),
    ("count", true),
    ("index", true),
    ("append", false),
    ("clear", false),
    ("extend", false),
    ("insert", false),
    ("pop", false),
    ("remove", false),
    ("reverse", false),
    ("sort", false),
];

const STR_METHODS: [&str; 46] = [
    "capitalize",
    "casefold",
    "center",
    "count",
    "endswith",
    "expandtabs",
    "find",
    "format",
    "format_map",
    "index",
    "isalnum",
    "isalpha",
    "isascii",
    "isdecimal",
    "isdigit",
    "isidentifier",
    "islower",
    "isnumeric",
    "isprintable",
    "isspace",
    "istitle",
    "isupper",
    "join",
    "ljust",
    "lower",
    "lstrip",
    "partition",
    "removeprefix",
    "removesuffix",
    "replace",
    "rfind",
    "rindex",
    "rjust",
    "rpartition",
    "rsplit",
    "rstrip",
    "split",
    "splitlines",
    "startswith",
    "strip",
    "swapcase",
    "title",
    "translate",
    "upper",
    "zfill",
    "encode",
];

const TUPLE_METHODS: [(&str, bool); 2] = [("count", true), ("index", true)];

/// Returns whether `name` is a method of some type, which an attribute of that name may mean.
pub(super) fn is_method(name: &str) -> bool {
    [PythonType::Dict, PythonType::List, PythonType::Str]
        .iter()
        .any(|kind| method_named(*kind, name).is_some())
}

/// Returns whether `name` is a method of dicts, which an item of that name may stand for.
pub(super) fn is_dict_method(name: &str) -> bool {
    method_named(PythonType::Dict, name).is_some()
}

/// The method `name` of a type, and true if the sandbox allows it: methods that change the value
/// are hidden.
pub(super) fn method_named(kind: PythonType, name: &str) -> Option<(&'static str, bool)> {
    let methods: &[(&'static str, bool)] = match kind {
        PythonType::Dict => &DICT_METHODS,
        PythonType::List => &LIST_METHODS,
        PythonType::Tuple | PythonType::Range => &TUPLE_METHODS,
        PythonType::Str => {
            return STR_METHODS.into_iter().find(|method| *method == name).map(|name| (name, true));
        }
        _ => &[],
    };
    methods.iter().copied().find(|(method, _)| *method == name)
}

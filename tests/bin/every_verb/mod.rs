//! Behaviour that several verbs share: help, errors, base identity, foreign models, files,
//! security.

mod addresses;
mod bad_input;
mod base_identity;
mod bounds;
mod every_byte_of_a_base;
mod foreign;
mod help;
mod hostile_files;
mod outputs;
mod runs;
mod shared_models;
mod surface;
mod using_it;

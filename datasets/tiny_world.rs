//! Writes the text of the tiny world that the quickstart model is pre-trained on.
fn main() {}

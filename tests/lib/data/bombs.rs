//! Templates that would run or grow without end stop with a reason.

use std::time::Duration;

use finetune::data::ChatTemplate;
use finetune::data::template::TemplateInputs;
use serde_json::json;

fn refusal(text: &str) -> String {
    let messages = [json!({"role": "user", "content": "hi"}), json!({"role": "assistant", "content": "ho"})];
    match ChatTemplate::from_text(text, &[]) {
        Err(error) => error.to_string(),
        Ok(template) => match template.render(&messages, &TemplateInputs::default()) {
            Err(error) => error.to_string(),
            Ok(rendered) => panic!("{text:.80} printed {} bytes", rendered.text.len()),
        },
    }
}

#[test]
fn bombs_stop() {
    let deep = format!("{{{{ {}1{} }}}}", "(".repeat(50_000), ")".repeat(50_000));
    let long = format!("{{# {} #}}", "x".repeat(2 << 20));
    let cases = [
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{{ b }}{% endfor %}{% endfor %}",
            "prints more than",
        ),
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% set c = b %}{% endfor %}{% endfor %}",
            "steps",
        ),
        (
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(22) }}",
            "steps",
        ),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}", "recursion"),
        ("{% include 'default' %}", "cannot use other templates"),
        ("{% for a in range(99999) %}{{ 'x' * 100000 }}{% endfor %}", "prints more than"),
        ("{{ 'x' * 99999999999 }}", "too large"),
        ("{{ range(9999999999) | list }}", "too many elements"),
        (&deep, "recursion limits"),
        (&long, "bytes"),
        ("{% include '/etc/passwd' %}", "cannot use other templates"),
        ("{% extends 'default' %}", "cannot use other templates"),
    ];
    for (text, reason) in cases {
        let text = text.to_owned();
        let (send, receive) = std::sync::mpsc::channel();
        let about = text.chars().take(60).collect::<String>();
        std::thread::spawn(move || send.send(refusal(&text)));
        // Far more time than the limit; only an unlimited template fails here.
        let why =
            receive.recv_timeout(Duration::from_secs(300)).unwrap_or_else(|_| panic!("{about} runs on"));
        assert!(why.contains(reason), "{about}: {why}");
    }
}

#[test]
fn what_a_template_raises_is_the_reason() {
    let why = refusal("{{ raise_exception('Only <text> is known') }}");
    assert_eq!(why, "error: cannot render the chat template\n  caused by: Only <text> is known");
}

#[test]
fn a_broken_template_names_its_line() {
    let why = refusal("a\nb {% if %}");
    assert!(why.contains("line 2"), "{why}");
}

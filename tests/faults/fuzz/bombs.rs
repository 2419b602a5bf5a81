//! Chat templates that would exhaust memory, stack or time: each is refused, and the next chat is
//! rendered.

use std::time::{Duration, Instant};

use assert_cmd::cargo::cargo_bin;
use finetune::data::template::TemplateInputs;
use finetune::data::{ChatTemplate, Split, sandbox, source};
use parquet::basic::{BrotliLevel, Compression, GzipLevel, ZstdLevel};
use serde_json::json;

use super::{alone, counting, seeds};

/// Returns why `text` is refused or prints nothing.
fn refusal(text: &str) -> Option<String> {
    let messages = [json!({"role": "user", "content": "hi"}), json!({"role": "assistant", "content": "ho"})];
    match ChatTemplate::from_text(text, &[]) {
        Err(error) => Some(error.to_string()),
        Ok(template) => {
            template.render(&messages, &TemplateInputs::default()).err().map(|error| error.to_string())
        }
    }
}

/// Templates that nest without end, in their text or in the values they create.
fn nesting() -> Vec<String> {
    let many = |text: &str| text.repeat(100_000);
    let mut all = vec![
        format!("{{{{ {}1 }}}}", many("1+")),
        format!("{{{{ {}1 }}}}", many("not ")),
        format!("{{{{ {}1 }}}}", many("-")),
        format!("{{{{ messages{} }}}}", many("[0]")),
        format!("{{{{ 'a'{} }}}}", many("|trim")),
        format!("{{{{ {}1{} }}}}", many("("), many(")")),
        format!("{}x{}", many("{% if 1 %}"), many("{% endif %}")),
    ];
    for shown in [
        "ns.l",
        "ns.l|tojson",
        "ns.l|string|length",
        "ns.l == [ns.l]",
        "ns.l|pprint",
        "[ns.l, ns.l]|unique|list",
    ] {
        all.push(format!(
            "{{% set ns = namespace(l=[]) %}}{{% for a in range(99999) %}}{{% set ns.l = [ns.l] %}}{{% endfor %}}{{{{ {shown} }}}}"
        ));
    }
    for shown in ["ns|tojson", "ns.a|string", "[ns]|pprint"] {
        all.push(format!("{{% set ns = namespace() %}}{{% set ns.a = [ns] %}}{{{{ {shown} }}}}"));
    }
    all
}

/// Templates that request more memory than available.
fn memory() -> Vec<String> {
    let doubled = |change: &str, shown: &str| {
        format!(
            "{{% set ns = namespace(x='aaaaaaaa', l=[1, 2], m={{}}) %}}{{% for a in range(60) %}}{change}{{% endfor %}}{{{{ {shown} }}}}"
        )
    };
    let mut all = vec![
        doubled("{% set ns.x = ns.x ~ ns.x %}", "ns.x|length"),
        doubled("{% set ns.x = ns.x + ns.x %}", "ns.x|length"),
        doubled("{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}", "ns.x|length"),
        doubled("{% set ns.l = ns.l + ns.l %}", "ns.l|list|length"),
        doubled("{% set ns.l = [ns.l, ns.l] %}", "ns.l|string|length"),
        doubled("{% set ns.l = [ns.l, ns.l] %}", "ns.l|tojson"),
        doubled("{% set ns.x = ns.x|replace('a', 'aaaaaaaa') %}", "ns.x|length"),
    ];
    for text in [
        "{{ range(99999)|join('x' * 1000000)|length }}",
        "{{ (('a' * 1000000)|replace('a', 'b' * 1000000))|length }}",
        "{{ ('a\\n' * 1000000)|indent(10000000)|length }}",
        "{{ messages|tojson(indent=1000000000)|length }}",
        "{{ messages|tojson(indent=200, separators=['x' * 100000000, 'y' * 100000000])|length }}",
        "{% for a in range(99999) %}{% for b in range(99) %}{% set c = 'x' * 90000000 %}{{ c[:1] }}{% endfor %}{% endfor %}",
        "{% macro f(x) %}{{ x }}{{ caller() }}{% endmacro %}{% for a in range(999) %}{% call f('x' * 60000000) %}y{% endcall %}{% endfor %}",
    ] {
        all.push(text.to_owned());
    }
    all
}

/// Templates with few steps that each take long.
const TIME: [&str; 4] = [
    "{% set l = range(99999)|list %}{% for a in range(99999) %}{% set b = l|sort|unique|list|sort(reverse=true) %}{% endfor %}",
    "{% set l = range(99999)|list %}{% for a in range(99999) %}{% set b = l|map('string')|join %}{% endfor %}",
    "{% set x = 'ab' * 10000000 %}{% for a in range(99999) %}{% set b = x|upper|lower|title|reverse %}{% endfor %}",
    "{% for a in range(99999) %}{% set b = ('a' * 9000000).count('aaaaaaab') %}{% endfor %}",
];

#[test]
fn templates_that_take_everything_are_refused() {
    let _alone = alone();
    sandbox::run_in(cargo_bin!("finetune").to_owned());
    let time = TIME.iter().map(|text| (*text).to_owned());
    let kinds = [("nesting", nesting()), ("memory", memory()), ("time", time.collect())];
    // Each takes a second of CPU time, so by default only some are tried.
    let step = if std::env::var_os("FINETUNE_FUZZ_SECS").is_some() { 1 } else { 5 };
    let all = kinds.iter().flat_map(|(kind, all)| all.iter().map(move |text| (kind, text)));
    for (kind, template) in all.step_by(step) {
        let shown: String = template.chars().take(120).collect();
        let (before, begun) = (counting::begin(), Instant::now());
        let why = refusal(template).unwrap_or_else(|| "printed".to_owned());
        let (took, held) = (begun.elapsed(), counting::peak().saturating_sub(before));
        eprintln!(
            "{kind}: {:.2} s, {} KiB: {shown}\n    {}",
            took.as_secs_f64(),
            held >> 10,
            why.replace('\n', " ")
        );
        // The limit is a second of CPU time, which each refusal names; only an unlimited template
        // fails here.
        assert!(took < Duration::from_secs(300), "{shown} takes {took:?}");
        assert!(held < 200 << 20, "{shown} takes {held} bytes of this process");
        assert!(!why.contains("internal error"), "{shown}: {why}");
        assert!(*kind == "nesting" || why != "printed", "{shown} is no bomb");
    }
    // A chat whose process ends does not affect the next one.
    let text = "{% if messages|length == 1 %}{% set ns = namespace(x='aaaaaaaa') %}{% for a in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{% endif %}{{ messages[0].content }}";
    let template = ChatTemplate::from_text(text, &[]).unwrap();
    let render = |messages: &[serde_json::Value]| template.render(messages, &TemplateInputs::default());
    let message = json!({"role": "user", "content": "hi"});
    for _ in 0..2 {
        let error = render(std::slice::from_ref(&message)).unwrap_err().to_string();
        // On a busy machine the time limit may be reached before the memory limit.
        assert!(error.contains("memory") || error.contains("processor time"), "{error}");
        assert_eq!(render(&[message.clone(), message.clone()]).unwrap().text, "hi");
    }
}

#[test]
fn tables_that_become_gigabytes_are_refused() {
    let _alone = alone();
    sandbox::run_in(cargo_bin!("finetune").to_owned());
    let folder = tempfile::tempdir().unwrap();
    let refusal = |name: &str, bytes: &[u8]| {
        let path = folder.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        let (before, begun) = (counting::begin(), Instant::now());
        let error = source::read(&path, Split::Train).unwrap_err().to_string();
        let held = counting::peak().saturating_sub(before);
        eprintln!("{name}: {:.2} s, {} MiB", begun.elapsed().as_secs_f64(), held >> 20);
        assert!(held < 400 << 20, "{name} takes {held} bytes");
        error
    };
    let rows = refusal("rows.parquet", &seeds::null_rows(300_000));
    assert!(rows.contains("it claims 300000 rows or more in"), "{rows}");
    let rows = refusal("rows.arrow", &seeds::arrow_of_nulls(1 << 40));
    assert!(rows.contains(&format!("it claims {} rows or more in", 1_u64 << 40)), "{rows}");
    for text in [
        vec![b' '; 100 << 20],
        "{}\n".repeat(300_000).into_bytes(),
        [b"[", &b"0,".repeat(20 << 20)[..], b"0]"].concat(),
    ] {
        for bytes in seeds::packed(&text) {
            let why = refusal("rows.jsonl", &bytes);
            assert!(why.contains(" bytes become more than ") || why.contains("rows or more in"), "{why}");
        }
    }
    let names = format!("{}\n{}", "n".repeat(100_000), "a\n".repeat(100_000));
    let names = refusal("names.csv", names.as_bytes());
    assert!(names.contains("its 300001 bytes become more than 150000500 bytes of rows"), "{names}");
    let codecs = [
        Compression::ZSTD(ZstdLevel::default()),
        Compression::GZIP(GzipLevel::default()),
        Compression::BROTLI(BrotliLevel::default()),
        Compression::LZ4_RAW,
    ];
    for codec in codecs {
        let long = refusal("long.parquet", &seeds::long_row(100 << 20, codec));
        let many = long.contains("bytes become more than ") && long.contains(" bytes of rows");
        assert!(many || long.contains("processor time"), "{codec}: {long}");
    }
    let longer = refusal("longer.parquet", &seeds::long_row(300 << 20, codecs[0]));
    assert!(longer.contains("memory") || longer.contains("processor time"), "{longer}");
}

#[test]
fn children_render_what_this_process_renders() {
    sandbox::run_in(cargo_bin!("finetune").to_owned());
    let text = "{% for m in messages %}{{ bos_token }}{{ m|tojson }}{{ m.n }}|{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}{{ tools|tojson }}{{ strftime_now('%Y-%m-%d %H:%M:%S %z') }}{{ add_generation_prompt }}";
    let now = chrono::DateTime::parse_from_rfc3339("2024-02-29T23:59:58+05:30").unwrap();
    let template = ChatTemplate::from_text(text, &[("bos_token", "<s>")]).unwrap().at(now);
    let messages = [
        json!({"z": 1, "content": "é😀\u{0}", "a": [0.1, 1e300, 123_456_789.123_456_79, -5, u64::MAX], "n": 0.30000000000000004}),
        json!({"content": "b", "n": null}),
    ];
    let tools = json!([{"type": "function", "function": {"name": "f"}}]);
    let inputs = TemplateInputs { tools: Some(&tools), add_generation_prompt: true, options: None };
    let rendered = template.render(&messages, &inputs).unwrap();
    let expected = "<s>{\"z\": 1, \"content\": \"é😀\\u0000\", \"a\": [0.1, 1e+300, 123456789.12345679, -5, 18446744073709551615], \"n\": 0.30000000000000004}0.30000000000000004|é😀\0<s>{\"content\": \"b\", \"n\": null}None|b[{\"type\": \"function\", \"function\": {\"name\": \"f\"}}]2024-02-29 23:59:58 +0530True";
    assert_eq!(rendered.text, expected);
    assert_eq!(
        rendered.spans.iter().map(|span| &rendered.text[span.clone()]).collect::<Vec<_>>(),
        ["é😀\0", "b"]
    );
    template.release();
    assert_eq!(template.render(&messages, &inputs).unwrap(), rendered, "and again after a pause");
}

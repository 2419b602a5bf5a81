//! The calculator in the page of `finetune plan --html`, run by a JavaScript engine: it draws the
//! same numbers as `plan` prints.

use rquickjs::{Context, Runtime};
use serde_json::{Value, json};

use crate::exhaustive::each_third;
use crate::plan::sizing::{SHAPES, plan, shapes};
use crate::test_dir::TestDir;

/// The parts of memory that the page draws.
const CAUSES: [&str; 5] = ["weights", "gradients", "optimizer", "activations", "workspace"];
/// Ranks; then method, dtype, optimizer state, masters, strategy, recompute.
const SETTINGS: [(u64, [&str; 6]); 10] = [
    (8, ["full", "bf16", "f32", "f32", "fsdp", "none"]),
    (8, ["full", "bf16", "int8", "none", "ddp", "block"]),
    (8, ["full", "f32", "f32", "f32", "zero2", "none"]),
    (8, ["full", "bf16", "f32", "f32", "zero1", "block"]),
    (8, ["lora", "bf16", "f32", "f32", "fsdp", "none"]),
    (8, ["lora", "bf16", "f32", "f32", "ddp", "block"]),
    (8, ["qlora", "bf16", "f32", "f32", "ddp", "none"]),
    (8, ["qlora", "bf16", "int8", "f32", "fsdp", "block"]),
    (1, ["full", "bf16", "int8", "none", "single", "block"]),
    (1, ["lora", "bf16", "f32", "f32", "single", "none"]),
];

/// Returns the memory that the page's functions without a document compute for a model under
/// `settings`.
fn drawn(page: &str, parameters: u64, settings: &Value, shape: &Value) -> Value {
    let start = page.find("const causes =").unwrap();
    let arithmetic = &page[start..page.find("function settings()").unwrap()];
    let context = Context::full(&Runtime::new().unwrap()).unwrap();
    let code = format!("{arithmetic}; JSON.stringify(memory({parameters}, {settings}, {shape}))");
    let text: String = context.with(|context| context.eval(code)).unwrap();
    serde_json::from_str(&text).unwrap()
}

/// Returns the plan of the command and the memory computed by its page.
fn both(
    dir: &TestDir,
    (model, shape): (&str, &Value),
    row: u64,
    (ranks, settings): (u64, [&str; 6]),
) -> (Value, Value) {
    let [method, dtype, state, master, strategy, recompute] = settings;
    let sets = [
        format!("model.dtype={dtype}"),
        format!("optimizer.state={state}"),
        format!("optimizer.master={master}"),
        format!("parallel.strategy={strategy}"),
        format!("train.recompute={recompute}"),
        "train.micro_batch_size=2".into(),
        "train.gradient_accumulation_steps=1".into(),
        format!("data.max_seq_len={row}"),
    ];
    let on = format!("{ranks}xA100-80GB");
    let mut args = vec!["--on", on.as_str(), "--recipe", method, "--html", "page.html"];
    args.extend(sets.iter().flat_map(|set| ["--set", set]));
    let said = plan(dir, model, &args);
    let page = std::fs::read_to_string(dir.path("page.html")).unwrap();
    let settings = json!({"ranks": ranks, "row": row, "batch": 2, "method": method, "dtype": dtype, "state": state,
        "master": master, "strategy": strategy, "recompute": recompute});
    // The page counts the model's parameters only, the plan also the adapters'.
    let count = |key: &str| said[key].as_u64().unwrap();
    let parameters = count("parameters") - if method == "full" { 0 } else { count("trainable") };
    let drawn = drawn(&page, parameters, &settings, shape);
    (said, drawn)
}

#[test]
fn the_page_calculates_what_the_plan_says() {
    let (dir, mut off) = (shapes(), Vec::new());
    for (place_of_model, (model, [hidden, mlp, layers, heads, kv, vocabulary], tied)) in
        SHAPES.into_iter().enumerate()
    {
        let shape = json!({"layers": layers, "hidden": hidden, "mlp": mlp, "heads": heads, "kv": hidden / heads * kv,
            "vocabulary": vocabulary, "tied": tied});
        let settings = SETTINGS.into_iter().zip([2048, 512].into_iter().cycle());
        for (settings, row) in each_third(settings, place_of_model) {
            let (said, drawn) = both(&dir, (model, &shape), row, settings);
            let terms = said["memory"].as_array().unwrap();
            let (mut all, mut all_planned) = (0.0, 0.0);
            for cause in CAUSES {
                let planned = terms.iter().find(|term| term["cause"] == cause).unwrap();
                let [drawn, planned] =
                    [&drawn[cause], &planned["bytes"]].map(|bytes| bytes.as_f64().unwrap());
                (all, all_planned) = (all + drawn, all_planned + planned);
                if (drawn / planned - 1.0).abs() > 0.04 {
                    off.push(format!("{model}, {settings:?}, {cause}: {drawn:.3e}, planned {planned:.3e}"));
                }
            }
            if (all / all_planned - 1.0_f64).abs() > 0.01 {
                off.push(format!("{model}, {settings:?}: {all:.3e}, planned {all_planned:.3e}"));
            }
        }
    }
    assert!(off.is_empty(), "{}", off.join("\n"));
}

/// Each shape of the slider has the parameter count shown below it.
#[test]
fn the_shapes_of_the_page_have_their_size() {
    let page = include_str!("../../../crates/planning/src/planning/sizing/explorer.html");
    let start = page.find("const causes =").unwrap();
    let arithmetic = &page[start..page.find("// The memory of a rank").unwrap()];
    let count = "sizes.map(p => { const s = shape(p); return [p, s.layers * (2 * s.hidden * (s.hidden + s.kv) \
                 + 3 * s.hidden * s.mlp) + (s.tied ? 1 : 2) * s.vocabulary * s.hidden]; })";
    let context = Context::full(&Runtime::new().unwrap()).unwrap();
    let text: String =
        context.with(|context| context.eval(format!("{arithmetic}; JSON.stringify({count})"))).unwrap();
    let counted: Vec<[f64; 2]> = serde_json::from_str(&text).unwrap();
    assert!(!counted.is_empty());
    for [named, has] in counted {
        assert!((has / named - 1.0).abs() < 0.02, "{named:e} has {has:e}");
    }
}

/// A minimal browser document for the page's script: elements with values, and lists with options.
const DOCUMENT: &str = r#"
const elements = {};
const document = {
  getElementById: id => elements[id] ??= element(id),
  querySelectorAll: () => [],
  createElement: newNode,
  createElementNS: (space, tag) => newNode(tag),
};
function newNode(tag) {
  return { tag, style: {}, attributes: {}, children: [],
    setAttribute(name, value) { this.attributes[name] = value; },
    append(...children) { this.children.push(...children); },
    replaceChildren(...children) { this.children = children; } };
}
function Option(text, value) { return Object.assign(newNode("option"), { value, children: [text] }); }
function element(id) {
  const list = new RegExp(`<select id="${id}">(.*?)</select>`).exec(page);
  const options = list ? [...list[1].matchAll(/<option(?: value="(.*?)")?( selected)?>(.*?)<\/option>/g)] : [];
  const values = options.map(option => ({ value: option[1] ?? option[3], isFirst: Boolean(option[2]) }));
  const input = new RegExp(`<input id="${id}"[^>]* value="(.*?)"`).exec(page);
  const chosen = values.find(option => option.isFirst) ?? values[0];
  return Object.assign(newNode(id), { options: values, value: chosen?.value ?? input?.[1] ?? "", textContent: "" });
}
const texts = node => typeof node === "string" ? [node] : node.children.flatMap(texts);
"#;

/// The page of a plan after its script has run: the values of its controls, the sentence below the
/// chart, and whether the chart marks the crossover.
fn opened(dir: &TestDir, model: &str, args: &[&str]) -> Value {
    plan(dir, model, &[args, &["--html", "page.html"]].concat());
    let page = std::fs::read_to_string(dir.path("page.html")).unwrap();
    let (html, script) = page.split_once("<script>").unwrap();
    let script = script.split_once("</script>").unwrap().0.replace("\"use strict\";", "");
    let asked = r#"; JSON.stringify({ values: Object.fromEntries(Object.entries(elements).map(([id, e]) => [id, String(e.value)])),
        said: $("crossover").textContent, marked: texts($("chart")).includes("from here states are more than activations"),
        at: crossover(settings()), sides: [0.99, 1.01].map(part => {
          const m = memory(part * crossover(settings()), settings());
          return m.weights + m.gradients + m.optimizer > m.activations;
        }) })"#;
    let code = format!("const page = {}; {DOCUMENT}; {script}{asked}", json!(html));
    let context = Context::full(&Runtime::new().unwrap()).unwrap();
    let text: String = context.with(|context| {
        context.eval(code).unwrap_or_else(|error| panic!("{error}: {:?}", context.catch().as_exception()))
    });
    serde_json::from_str(&text).unwrap()
}

/// The controls start with the plan's values, including states and masters.
#[test]
fn the_page_begins_with_the_plan() {
    let dir = shapes();
    let begins = |recipe: &str, sets: &[&str]| {
        let mut args = vec!["--on", "8xA100-80GB", "--recipe", recipe];
        args.extend(sets.iter().flat_map(|set| ["--set", set]));
        let values = opened(&dir, "1B", &args)["values"].clone();
        ["ranks", "row", "method", "dtype", "state", "master", "strategy", "recompute"]
            .map(|id| values[id].as_str().unwrap().to_owned())
    };
    let long = "data.max_seq_len=8192";
    assert_eq!(
        begins("full", &["parallel.strategy=zero1"]),
        ["3", "11", "full", "bf16", "f32", "f32", "zero1", "none"]
    );
    let lean = [
        "optimizer.state=int8",
        "optimizer.master=none",
        "parallel.strategy=fsdp",
        "train.recompute=block",
        long,
    ];
    assert_eq!(begins("full", &lean), ["3", "13", "full", "bf16", "int8", "none", "fsdp", "block"]);
    assert_eq!(
        begins("full", &["optimizer.master=none", "parallel.strategy=zero2"]),
        ["3", "11", "full", "bf16", "f32", "none", "zero2", "none"]
    );
    // Weights in f32 have no masters, and an adapter always has its own: the slider keeps its
    // default.
    assert_eq!(
        begins("full", &["model.dtype=f32", "optimizer.state=int8", "parallel.strategy=ddp"]),
        ["3", "11", "full", "f32", "int8", "f32", "ddp", "none"]
    );
    assert_eq!(
        begins("qlora", &["optimizer.state=int8", "parallel.strategy=ddp"]),
        ["3", "11", "qlora", "bf16", "int8", "f32", "ddp", "none"]
    );
}

/// The page finds the size at which optimizer states exceed activations. It claims no crossover
/// below its smallest size.
#[test]
fn the_page_says_from_where_on_states_are_more() {
    let dir = shapes();
    let with = |ranks: &str, recipe: &str, row: u64| {
        let row = format!("data.max_seq_len={row}");
        let sets = ["--set", "parallel.strategy=ddp", "--set", "train.recompute=none", "--set", &row];
        let page = opened(&dir, "1B", &[&["--on", ranks, "--recipe", recipe][..], &sets].concat());
        (page["said"].as_str().unwrap().to_owned(), page)
    };
    // 18 bytes a parameter are 18 GB for 1B; 2,048 tokens of activations take less than two.
    let (said, page) = with("8xA100-80GB", "full", 2048);
    assert!(
        said.ends_with("Weights, gradients and states are more than activations at every size here."),
        "{said}"
    );
    assert!(page["marked"] == false && !said.contains("From 1B"), "{said}");
    // 131,072 tokens of 1B take over 100 GB, and grow roughly with the square root of the size.
    let (said, page) = with("8xA100-80GB", "full", 131_072);
    let at = page["at"].as_f64().unwrap();
    assert!((1e9..1e12).contains(&at) && page["marked"] == true, "{at:e}");
    assert_eq!(page["sides"], json!([false, true]), "{said}");
    let figure = said.split("From ").nth(1).unwrap().split("B on").next().unwrap().parse::<f64>().unwrap();
    assert!((figure * 1e9 / at - 1.0).abs() < 0.01, "{said}: {at:e}");
    // LoRA's states are a thousandth. With long rows they stay below activations even at a trillion
    // parameters, unless the weights count, too.
    let (said, page) = with("8xA100-80GB", "qlora", 131_072);
    assert!(
        page["marked"] == page["at"].is_number() && (page["marked"] == true) == said.contains("B on weights"),
        "{said}"
    );
}

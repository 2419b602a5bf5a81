//! The calculator in the page of `finetune plan --html`, run by a JavaScript engine: what it draws is what `plan` says.

use rquickjs::{Context, Runtime};
use serde_json::{Value, json};

use crate::place::Place;
use crate::sizing::{SHAPES, plan, shapes};

/// The causes that the page draws.
const CAUSES: [&str; 5] = ["weights", "gradients", "optimizer", "activations", "workspace"];
/// Ranks; method, dtype, optimizer state, masters, strategy, recompute.
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

/// What the page calculates for a model under its settings: its functions that need no document.
fn drawn(page: &str, parameters: u64, settings: &Value, shape: &Value) -> Value {
    let start = page.find("const causes =").unwrap();
    let arithmetic = &page[start..page.find("function settings()").unwrap()];
    let context = Context::full(&Runtime::new().unwrap()).unwrap();
    let code = format!("{arithmetic}; JSON.stringify(memory({parameters}, {settings}, {shape}))");
    let text: String = context.with(|context| context.eval(code)).unwrap();
    serde_json::from_str(&text).unwrap()
}

/// What the command says, and what its page calculates.
fn both(
    place: &Place,
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
    let said = plan(place, model, &args);
    let page = std::fs::read_to_string(place.path("page.html")).unwrap();
    let settings = json!({"ranks": ranks, "row": row, "batch": 2, "method": method, "dtype": dtype, "state": state,
        "master": master, "strategy": strategy, "recompute": recompute});
    // The page counts the model's parameters, the plan the adapters', too.
    let count = |key: &str| said[key].as_u64().unwrap();
    let parameters = count("parameters") - if method == "full" { 0 } else { count("trainable") };
    let drawn = drawn(&page, parameters, &settings, shape);
    (said, drawn)
}

#[test]
fn the_page_calculates_what_the_plan_says() {
    let (place, mut off) = (shapes(), Vec::new());
    for (model, [hidden, mlp, layers, heads, kv, vocabulary], tied) in SHAPES {
        let shape = json!({"layers": layers, "hidden": hidden, "mlp": mlp, "heads": heads, "kv": hidden / heads * kv,
            "vocabulary": vocabulary, "tied": tied});
        for (settings, row) in SETTINGS.into_iter().zip([2048, 512].into_iter().cycle()) {
            let (said, drawn) = both(&place, (model, &shape), row, settings);
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

/// The shapes of the slider have the parameters that stand under them.
#[test]
fn the_shapes_of_the_page_have_their_size() {
    let page = include_str!("../../src/sizing/explorer.html");
    let start = page.find("const causes =").unwrap();
    let arithmetic = &page[start..page.find("// The memory of a rank").unwrap()];
    let count = "sizes.map(p => { const s = shape(p); return [p, s.layers * (2 * s.hidden * (s.hidden + s.kv) \
                 + 3 * s.hidden * s.mlp) + (s.tied ? 1 : 2) * s.vocabulary * s.hidden]; })";
    let context = Context::full(&Runtime::new().unwrap()).unwrap();
    let text: String =
        context.with(|context| context.eval(format!("{arithmetic}; JSON.stringify({count})"))).unwrap();
    let counted: Vec<[f64; 2]> = serde_json::from_str(&text).unwrap();
    assert_eq!(counted.len(), 10);
    for [named, has] in counted {
        assert!((has / named - 1.0).abs() < 0.02, "{named:e} has {has:e}");
    }
}

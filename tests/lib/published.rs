//! Numbers of parameters that the makers of models publish, from the config.json of each.

use finetune::model::{ModelConfig, parameters, unused_weights};
use serde_json::Value;

/// The table has the number of parameters that makers publish, without the layers that predict
/// further tokens. Rows with `source` "transformers" have the count of transformers' class for the
/// published sizes: the text part of a model has no number of its own, and the files of Falcon have
/// a head besides the embedding, which their class ties. Of mixtures whose
/// makers count the embedding, the table has the number for a token, in billions as they round it.
/// That of Gemma 4 E2B and E4B ("effective") leaves out the embedding and counts other parts than
/// those of text.
#[test]
fn counts_are_the_published_ones() {
    let table: Vec<Value> = serde_json::from_str(include_str!("../golden/published.json")).unwrap();
    let (mut equal, mut counted) = (0, Vec::new());
    for model in &table {
        let name = model["name"].as_str().unwrap();
        let config = ModelConfig::from_json(&model["config"].to_string(), name).unwrap();
        let all: u64 = parameters(&config).iter().map(|spec| spec.len() as u64).sum();
        let published = model["parameters"].as_f64().unwrap();
        assert!((all as f64 / published - 1.0).abs() < 0.005, "{name}: {all}, published {published}");
        let is_equal = usize::from(all as f64 == published);
        match model.get("source").map(|source| source.as_str().unwrap()) {
            None => equal += is_equal,
            Some("transformers") => counted.push(is_equal),
            Some(other) => panic!("{name} has the source {other}"),
        }
        let active = all - unused_weights(&config);
        match model.get("active").and_then(Value::as_str) {
            None => {
                let uses_all = config.experts().next().is_none() && config.per_layer_width(1) == 0;
                assert_eq!(active == all, uses_all, "{name}: {active}");
            }
            Some(published) => {
                let digits = published.split_once('.').map_or(0, |(_, digits)| digits.len());
                let rounded = format!("{:.digits$}", active as f64 / 1e9);
                assert_eq!(rounded, published, "{name}: {active}");
            }
        }
    }
    // docs/models.md states these numbers.
    let equal_counted = counted.iter().sum::<usize>();
    assert_eq!([table.len(), counted.len(), equal_counted, equal], [68, 20, 17, 42]);
}

//! The preference recipes as they stand: each learns from the rows and the model in the binary.

use serde_json::Value;

use crate::test_dir::TestDir;

/// Recipe, steps, and whether it reports the share of pairs in the right order.
const RECIPES: [(&str, &str, bool); 5] = [
    ("dpo", "24", true),
    ("orpo", "24", true),
    ("cpo", "24", true),
    ("simpo", "24", true),
    ("kto", "48", false),
];

/// The evaluations of a run, as metrics.jsonl has them.
fn evaluations(dir: &TestDir, output: &str) -> Vec<Value> {
    let text = std::fs::read_to_string(dir.path(output).join("metrics.jsonl")).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    lines.filter(|line| line.get("eval_loss").is_some()).collect()
}

#[test]
fn every_recipe_learns_to_prefer_the_chosen_answers() {
    let dir = TestDir::new();
    for (recipe, steps, has_accuracies) in RECIPES {
        dir.said(&[
            "--recipe",
            recipe,
            "--steps",
            steps,
            "--output",
            recipe,
            "--set",
            "log.tensorboard=false",
        ]);
        let evaluations = evaluations(&dir, recipe);
        let [first, .., last] = evaluations.as_slice() else { panic!("{recipe}: {evaluations:?}") };
        let number = |line: &Value, key: &str| line["eval_objective"][key].as_f64().unwrap();
        assert!(last["eval_loss"].as_f64() < first["eval_loss"].as_f64(), "{recipe}: {first} {last}");
        let margins = [first, last].map(|line| number(line, "rewards/margins"));
        assert!(margins[1] > margins[0], "{recipe}: {margins:?}");
        assert!(!has_accuracies || number(last, "rewards/accuracies") > 0.7, "{recipe}: {last}");
    }
}

use super::*;

fn model() -> Vec<Module> {
    let module = |name: String, kind, shape: &[usize]| Module { name, kind, shape: shape.into() };
    let mut modules = vec![module("model.embed_tokens".into(), ModuleKind::Embedding, &[48, 8])];
    for layer in [0, 1, 10] {
        let block = format!("model.layers.{layer}");
        modules.push(module(format!("{block}.input_layernorm"), ModuleKind::Norm, &[8]));
        for name in ["self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj"] {
            modules.push(module(format!("{block}.{name}"), ModuleKind::Linear, &[8, 8]));
        }
    }
    modules.push(module("model.norm".into(), ModuleKind::Norm, &[8]));
    modules.push(module("lm_head".into(), ModuleKind::Head, &[48, 8]));
    modules
}

fn list(names: &[&str]) -> NamePattern {
    NamePattern::List(names.iter().map(|&name| name.into()).collect())
}

fn named(names: NamePattern) -> TargetSpec {
    TargetSpec { target_modules: ModulePattern::Named(names), ..Default::default() }
}

fn short(spec: &TargetSpec) -> Vec<String> {
    let targets = resolve(spec, &model()).expect("resolves");
    targets.iter().map(|target| target.name.replace("model.layers.", "").replace("_proj", "")).collect()
}

fn error(spec: &TargetSpec) -> String {
    resolve(spec, &model()).expect_err("refused").to_string()
}

/// Recipes for models that also take images name the modules of the text part with its prefix.
#[test]
fn a_pattern_may_name_the_text_part_of_a_model_for_images() {
    for pattern in [
        r"model\.language_model\.layers\.\d+\.self_attn\.q_proj",
        r"language_model\.model\.layers\..*\.q_proj",
        r".*language_model.*q_proj",
    ] {
        let spec = named(NamePattern::Regex(pattern.into()));
        assert_eq!(short(&spec), ["0.self_attn.q", "1.self_attn.q", "10.self_attn.q"], "{pattern}");
    }
    assert!(error(&named(NamePattern::Regex(r"vision_tower\..*q_proj".into()))).contains("vision_tower"));
}

#[test]
fn all_linear_leaves_the_head_alone() {
    let spec = TargetSpec::default();
    assert_eq!(
        short(&spec),
        [
            "0.self_attn.q",
            "0.self_attn.o",
            "0.mlp.gate",
            "1.self_attn.q",
            "1.self_attn.o",
            "1.mlp.gate",
            "10.self_attn.q",
            "10.self_attn.o",
            "10.mlp.gate"
        ]
    );
}

#[test]
fn a_list_matches_whole_words_at_the_end() {
    assert_eq!(short(&named(list(&["0.self_attn.q_proj", "lm_head"]))), ["0.self_attn.q", "lm_head"]);
    // `proj` ends many names, but not after a dot.
    assert!(error(&named(list(&["proj"]))).contains("`proj`, which matches no module"));
}

#[test]
fn a_string_is_a_regex_for_the_whole_name() {
    assert_eq!(
        short(&named(NamePattern::Regex(r".*\.1\..*(q|gate)_proj".into()))),
        ["1.self_attn.q", "1.mlp.gate"]
    );
    assert!(error(&named(NamePattern::Regex("q_proj".into()))).contains("matches no module"));
    assert!(error(&named(NamePattern::Regex("(".into()))).contains("unclosed group"));
}

#[test]
fn exclusions_and_saved_modules_get_no_lora() {
    let mut spec = TargetSpec { exclude_modules: list(&["o_proj", "mlp.gate_proj"]), ..Default::default() };
    assert_eq!(short(&spec), ["0.self_attn.q", "1.self_attn.q", "10.self_attn.q"]);
    spec.exclude_modules = NamePattern::Regex(r".*\.(0|10)\..*".into());
    spec.modules_to_save = vec!["mlp".into()];
    assert_eq!(short(&spec), ["1.self_attn.q", "1.self_attn.o"]);
    spec.exclude_modules = list(&["k_proj"]);
    assert!(error(&spec).contains("`exclude_modules` has `k_proj`"));
}

#[test]
fn layers_restrict_ends_of_names_only() {
    let mut spec = named(list(&["q_proj", "model.layers.0.mlp.gate_proj"]));
    spec.layers_to_transform = Some(vec![1]);
    assert_eq!(short(&spec), ["0.mlp.gate", "1.self_attn.q"]);
    spec.layers_pattern = vec!["layers".into()];
    assert_eq!(short(&spec), ["0.mlp.gate", "1.self_attn.q"]);
    spec.layers_pattern = vec!["blocks".into()];
    assert_eq!(short(&spec), ["0.mlp.gate"]);
}

#[test]
fn ranks_and_scales() {
    let mut spec = named(list(&["q_proj", "gate_proj"]));
    (spec.r, spec.lora_alpha) = (4, 16.0);
    // The first matching key wins; `1.self_attn.q_proj` must not match layer 10 or the 1 of a
    // longer word.
    spec.rank_pattern = vec![("0.self_attn.q_proj".into(), 2), ("q_proj".into(), 16)];
    spec.alpha_pattern = vec![(r"layers\.\d+\.mlp.*".into(), 8.0)];
    let triples = |spec: &TargetSpec| {
        let targets = resolve(spec, &model()).expect("resolves");
        targets.iter().map(|t| (t.r, t.alpha, t.scale)).collect::<Vec<_>>()
    };
    let rest = [(16, 16.0, 1.0), (4, 8.0, 2.0)];
    assert_eq!(triples(&spec), [[(2, 16.0, 8.0), (4, 8.0, 2.0)], rest, rest].concat());
    spec.use_rslora = true;
    assert_eq!(triples(&spec)[2..4], [(16, 16.0, 4.0), (4, 8.0, 4.0)]);
}

#[test]
fn a_name_without_effect_is_an_error() {
    insta::assert_snapshot!(error(&named(list(&["q_prj"]))), @r"
    error: cannot choose the modules that get LoRA
      caused by: `target_modules` has `q_prj`, which matches no module; the model has embed_tokens, gate_proj, input_layernorm, lm_head, norm, o_proj, q_proj
    hint: did you mean `q_proj`?
    ");
    let unused = TargetSpec { rank_pattern: vec![("up_proj".into(), 4)], ..Default::default() };
    insta::assert_snapshot!(error(&unused), @"
    error: cannot choose the modules that get LoRA
      caused by: `rank_pattern` has `up_proj`, which matches no module with LoRA
    hint: remove it, or write the end of a module's name: `q_proj`
    ");
    insta::assert_snapshot!(error(&named(list(&["norm"]))), @r#"
    error: cannot choose the modules that get LoRA
      caused by: `target_modules` matches `model.norm`, a norm; accepted: linear layers, the embedding, the head
    hint: write `modules_to_save = ["norm"]` to train it whole
    "#);
    let none = TargetSpec { exclude_modules: NamePattern::Regex(".*".into()), ..Default::default() };
    insta::assert_snapshot!(error(&none), @"
    error: cannot choose the modules that get LoRA
      caused by: `target_modules` leaves no module: `exclude_modules`, `modules_to_save` and `layers_to_transform` take away every module that it matches
    hint: remove `exclude_modules`, `modules_to_save` and `layers_to_transform`
    ");
    insta::assert_snapshot!(error(&TargetSpec { r: 0, ..Default::default() }), @"
    error: cannot choose the modules that get LoRA
      caused by: `model.layers.0.self_attn.q_proj` has r 0 and lora_alpha 8; accepted: r from 1, a finite lora_alpha
    ");
}

#[test]
fn saved_modules_end_with_the_name() {
    let spec = |name: &str| TargetSpec { modules_to_save: vec![name.into()], ..Default::default() };
    assert_eq!(resolve_saved(&spec("lm_head"), &model()).expect("known"), ["lm_head"]);
    assert_eq!(resolve_saved(&spec("norm"), &model()).expect("known").len(), 4);
    assert!(resolve_saved(&spec("score"), &model()).is_err());
}

#[test]
fn tables_may_have_lora_where_they_are_named() {
    let targets = resolve(&named(list(&["embed_tokens", "lm_head"])), &model()).expect("resolves");
    let kinds: Vec<ModuleKind> = targets.iter().map(|target| target.kind).collect();
    assert_eq!(kinds, [ModuleKind::Embedding, ModuleKind::Head]);
    let all = resolve(&named(NamePattern::Regex(r".*(embed_tokens|\.0\..*q_proj)".into())), &model());
    assert_eq!(all.expect("resolves").len(), 2);
}

#[test]
fn rows_are_of_tables_and_within_them() {
    let spec = |name: &str, ids: &[u32]| TargetSpec {
        trainable_token_indices: BTreeMap::from([(name.into(), ids.into())]),
        ..Default::default()
    };
    let rows = |spec: &TargetSpec| resolve_rows(spec, &model());
    assert_eq!(
        rows(&spec("embed_tokens", &[47, 0])).expect("resolves"),
        BTreeMap::from([("model.embed_tokens".to_owned(), vec![47, 0])])
    );
    assert!(rows(&spec("lm_head", &[1])).is_ok());
    let mut errors: Vec<_> = [("q_proj", &[1][..]), ("embed_tokens", &[1, 48]), ("lm_head", &[3, 3])]
        .iter()
        .map(|(name, ids)| rows(&spec(name, ids)).expect_err(name).to_string())
        .collect();
    let saved = TargetSpec { modules_to_save: vec!["lm_head".into()], ..spec("lm_head", &[1]) };
    errors.push(rows(&saved).expect_err("saved too").to_string());
    let target_modules = ModulePattern::Named(list(&["lm_head"]));
    let adapted = TargetSpec { target_modules, ..spec("lm_head", &[1]) };
    errors.push(rows(&adapted).expect_err("adapted too").to_string());
    insta::assert_snapshot!(errors.join("\n"), @"
    error: cannot choose the tokens whose rows train
      caused by: `trainable_token_indices` has `q_proj`, which is no embedding or head; the model has embed_tokens, lm_head
    error: cannot choose the tokens whose rows train
      caused by: `trainable_token_indices` has token 48; `model.embed_tokens` has 48 rows; accepted: 0 to 47
    error: cannot choose the tokens whose rows train
      caused by: `trainable_token_indices` has token 3 twice
    error: cannot choose the tokens whose rows train
      caused by: `modules_to_save` has `lm_head` too
    hint: remove it from `modules_to_save`, or from `trainable_token_indices`
    error: cannot choose the tokens whose rows train
      caused by: `target_modules` has `lm_head` too
    hint: remove it from `target_modules`, or from `trainable_token_indices`
    ");
}

#[test]
fn written_names_mean_the_same_modules() {
    let mut spec =
        TargetSpec { exclude_modules: NamePattern::Regex(r".*\.0\.mlp.*".into()), ..Default::default() };
    let targets = resolve(&spec, &model()).expect("resolves");
    let names = target_names(&targets, &model());
    assert_eq!(names, ["model.layers.1.mlp.gate_proj", "model.layers.10.mlp.gate_proj", "o_proj", "q_proj"]);
    spec = named(NamePattern::List(names));
    assert_eq!(resolve(&spec, &model()).expect("resolves"), targets);
}

/// PEFT compares `0` with the last word of each module, so a name of `0` alone would choose blocks.
#[test]
fn a_number_in_a_list_of_modules_is_written_with_the_list() {
    let mut modules = model();
    modules.extend([0, 1].map(|number| Module {
        name: format!("model.altup_projections.{number}"),
        kind: ModuleKind::Linear,
        shape: [8, 8].into(),
    }));
    let targets = resolve(&TargetSpec::default(), &modules).expect("resolves");
    let names = target_names(&targets, &modules);
    assert_eq!(names, ["altup_projections.0", "altup_projections.1", "gate_proj", "o_proj", "q_proj"]);
}

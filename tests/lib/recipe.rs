//! Recipes from outside: the built-in ones, precedence of the layers, the resolved text, and the
//! wording of every error.

use std::path::Path;

use finetune::error::Error;
use finetune::recipe::{
    AdapterInit, AdapterSection, AutoOr, BUILT_IN, CommandLine, ComputeDtype, DataSource, ListenAddress,
    OnLongRow, Patterns, Purpose, Recipe, RecipeLayers, RecipeText, SchedulerKind, StepInterval, Strategy,
    TargetModules, Template,
};
use insta::assert_snapshot;
use proptest::{prop_assert_eq, prop_compose, proptest};

/// The minimum for training, to be completed.
const BASE: &str =
    "[model]\nid = \"org/m\"\n[data]\ntrain = [\"org/d\"]\n[optimizer]\nlearning_rate = 1e-3\n";

fn layers(text: &str, set: &[&str]) -> RecipeLayers {
    RecipeLayers {
        recipe: Some(RecipeText { name: "my.toml".into(), text: text.into(), folder: "/nowhere".into() }),
        set: set.iter().map(ToString::to_string).collect(),
        folder: "/nowhere".into(),
        ..RecipeLayers::default()
    }
}

fn load(text: &str, set: &[&str]) -> Recipe {
    Recipe::load(&layers(text, set)).unwrap()
}

/// Returns the error of `BASE` with `more` appended.
fn fault(more: &str) -> Error {
    Recipe::load(&layers(&format!("{BASE}{more}"), &[])).unwrap_err()
}

fn set_fault(set: &[&str]) -> Error {
    Recipe::load(&layers(BASE, set)).unwrap_err()
}

#[test]
fn every_built_in_recipe_resolves() {
    for recipe in BUILT_IN {
        assert!(recipe.text.starts_with("# "), "{} opens with what it is for", recipe.name);
        for word in ["Hardware:", "Memory:", "Command:"] {
            assert!(recipe.text.contains(word), "{} says its {word}", recipe.name);
        }
        for name in [recipe.name.to_owned(), format!("{}.toml", recipe.name)] {
            let layers = RecipeLayers {
                recipe: Some(RecipeText::find(&name, Path::new("/nowhere")).unwrap()),
                model: Some("org/m".into()),
                train: vec!["org/d".into()],
                folder: "/nowhere".into(),
                ..RecipeLayers::default()
            };
            Recipe::load(&layers).unwrap();
        }
    }
}

/// Returns the words of the `finetune` command in the header of a recipe, continued lines included.
fn header_command(text: &str) -> Vec<String> {
    let header = text.lines().map_while(|line| line.strip_prefix('#')).collect::<Vec<_>>().join("\n");
    let header = header.replace("\\\n", " ");
    let after = |line: &str| line.split_once("finetune ").map(|(_, command)| command.to_owned());
    let command = header.lines().skip_while(|line| !line.contains("Command:")).find_map(after).unwrap();
    command.split_whitespace().map(ToOwned::to_owned).collect()
}

#[test]
fn the_header_of_every_built_in_recipe_shows_a_command_that_lacks_nothing() {
    for recipe in BUILT_IN {
        let words = header_command(recipe.text);
        let value = |flag: &str| words.iter().skip_while(|word| *word != flag).nth(1).cloned();
        assert_eq!(value("--recipe").as_deref(), Some(recipe.name), "{words:?}");
        let flags = ["--model", "--recipe", "--dataset", "--eval-dataset", "--output", "--ranks"];
        assert!(words.iter().step_by(2).all(|word| flags.contains(&word.as_str())), "{words:?}");
        let layers = RecipeLayers {
            recipe: Some(RecipeText::find(recipe.name, Path::new("/nowhere")).unwrap()),
            model: value("--model").map(|_| "org/m".to_owned()),
            train: value("--dataset").map(|_| "org/d".to_owned()).into_iter().collect(),
            folder: "/nowhere".into(),
            ..RecipeLayers::default()
        };
        let loaded = Recipe::load(&layers).map_err(|error| format!("{}: {error}", recipe.name)).unwrap();
        // A recipe for own rows shows their form.
        if !matches!(recipe.name, "quickstart" | "pretrain-tiny") {
            let row = recipe.text.lines().find_map(|line| line.strip_prefix("# Rows:")).unwrap();
            let row = &row[row.find('{').unwrap()..=row.find('}').unwrap()];
            assert!(serde_json::from_str::<serde_json::Value>(row).is_ok(), "{}: {row}", recipe.name);
        }
        assert!(loaded.model.id.is_some() && !loaded.data.train.is_empty());
    }
}

#[test]
fn defaults_are_those_of_the_contract() {
    let recipe = load(&format!("{BASE}[adapter]\n"), &[]);
    let adapter = recipe.adapter.unwrap();
    assert_eq!((adapter.r, adapter.lora_alpha, adapter.lora_dropout), (16, 32.0, 0.0));
    assert_eq!(adapter.target_modules, TargetModules::AllLinear);
    assert_eq!(
        (recipe.data.max_seq_len, recipe.data.packing, recipe.data.shuffle),
        (AutoOr::Auto, true, true)
    );
    assert_eq!((recipe.data.longest_row(), recipe.train.accumulation()), (2048, 1));
    assert_eq!((recipe.train.epochs, recipe.train.max_grad_norm, recipe.train.seed), (3.0, 1.0, 0));
    assert_eq!(recipe.checkpoint.save_steps, StepInterval::Auto);
    assert_eq!((recipe.optimizer.betas, recipe.optimizer.eps), ([0.9, 0.999], 1e-8));
    assert_eq!(recipe.scheduler.kind, SchedulerKind::Cosine);
    assert_eq!((recipe.checkpoint.keep_last, recipe.log.every_steps, recipe.eval.at_end), (2, 1, true));
    assert_eq!((recipe.model.revision.as_str(), recipe.model.dtype), ("main", ComputeDtype::Auto));
    assert_eq!(load(BASE, &[]).adapter, None);
}

#[test]
fn set_wins_over_flags_over_recipe_over_defaults() {
    let text = "[model]\nid = \"org/text\"\n[data]\ntrain = [\"org/text\"]\neval = [\"org/text\"]\n\
                [optimizer]\nlearning_rate = 1e-3\nweight_decay = 0.1\n";
    let hub = |id: &str| DataSource::Hub(id.into());
    let mut layers = layers(text, &[]);
    layers.model = Some("org/flag".into());
    layers.train = vec!["org/flag".into(), "org/flag2".into()];
    let recipe = Recipe::load(&layers).unwrap();
    assert_eq!(recipe.model.id, Some(hub("org/flag")));
    assert_eq!(recipe.data.train, [hub("org/flag").into(), hub("org/flag2").into()]);
    assert_eq!(recipe.data.eval, [hub("org/text").into()]);

    layers.eval = vec!["org/flag".into()];
    layers.set = ["model.id=org/set", "data.eval=org/set", "optimizer.weight_decay=0.2", "train.epochs=2"]
        .map(str::to_owned)
        .to_vec();
    layers.set.push("train.epochs=3".into());
    let recipe = Recipe::load(&layers).unwrap();
    assert_eq!(recipe.model.id, Some(hub("org/set")));
    assert_eq!(recipe.data.eval, [hub("org/set").into()]);
    assert_eq!((recipe.optimizer.weight_decay, recipe.optimizer.learning_rate), (0.2, Some(1e-3)));
    assert_eq!(recipe.train.epochs, 3.0);
}

#[test]
fn a_value_of_set_is_toml_or_else_text() {
    let set = [
        "adapter.target_modules=[\"q_proj\"]",
        "adapter.rank_pattern={ v = 8, q = 4 }",
        "adapter.init=gaussian",
        "model.revision=7",
        "data.packing=false",
        "optimizer.betas=[0.8, 1e-1]",
        "train.max_steps = 20",
    ];
    let recipe = load(BASE, &set);
    let adapter = recipe.adapter.unwrap();
    assert_eq!(adapter.target_modules, TargetModules::Named(vec!["q_proj".into()]));
    assert_eq!(adapter.rank_pattern, Patterns(vec![("v".into(), 8), ("q".into(), 4)]));
    assert_eq!(adapter.init, AdapterInit::Gaussian);
    assert_eq!(recipe.model.revision, "7");
    assert!(!recipe.data.packing);
    assert_eq!((recipe.optimizer.betas, recipe.train.max_steps), ([0.8, 0.1], Some(20)));
}

#[test]
fn a_higher_layer_replaces_the_other_warm_up() {
    let text = format!("{BASE}[scheduler]\nwarmup_ratio = 0.1\n");
    let scheduler = load(&text, &["scheduler.warmup_steps=5"]).scheduler;
    assert_eq!((scheduler.warmup_steps, scheduler.warmup_ratio), (Some(5), None));
}

#[test]
fn paths_start_where_they_were_written() {
    let folder = tempfile::tempdir().unwrap();
    let recipes = folder.path().join("recipes");
    std::fs::create_dir_all(recipes.join("model")).unwrap();
    std::fs::write(recipes.join("rows.jsonl"), "").unwrap();
    std::fs::write(folder.path().join("rows.jsonl"), "").unwrap();
    std::fs::write(recipes.join("chat.jinja"), "{{ messages }}\n").unwrap();
    let text = "[model]\nid = \"model\"\n[data]\ntrain = [\"rows.jsonl\"]\nchat_template = \"chat.jinja\"\n\
                [optimizer]\nlearning_rate = 1\n";
    std::fs::write(recipes.join("mine.toml"), text).unwrap();
    let mut layers = RecipeLayers {
        recipe: Some(RecipeText::find("recipes/mine", folder.path()).unwrap()),
        folder: folder.path().into(),
        ..RecipeLayers::default()
    };
    let recipe = Recipe::load(&layers).unwrap();
    assert_eq!(recipe.model.id, Some(DataSource::Path(recipes.join("model"))));
    assert_eq!(recipe.data.train, [DataSource::Path(recipes.join("rows.jsonl")).into()]);
    assert_eq!(recipe.data.chat_template, Some(Template::of_text("{{ messages }}\n")));

    layers.train = vec!["rows.jsonl".into()];
    layers.model = Some("builtin:quickstart".into());
    let recipe = Recipe::load(&layers).unwrap();
    assert_eq!(recipe.data.train, [DataSource::Path(folder.path().join("rows.jsonl")).into()]);
    assert_eq!(recipe.model.id, Some(DataSource::Builtin("quickstart".into())));

    // The recorded recipe is valid from any folder.
    std::fs::write(folder.path().join("recipe.toml"), recipe.to_toml()).unwrap();
    let text = RecipeText::find("recipe.toml", folder.path()).unwrap();
    assert_eq!(
        Recipe::load(&RecipeLayers { recipe: Some(text), ..RecipeLayers::default() }).unwrap(),
        recipe
    );
}

#[test]
fn a_file_wins_over_a_built_in_recipe() {
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(RecipeText::find("lora", folder.path()).unwrap().name, "lora (built in)");
    std::fs::create_dir(folder.path().join("lora")).unwrap();
    assert_eq!(RecipeText::find("lora", folder.path()).unwrap().name, "lora (built in)");
    std::fs::write(folder.path().join("lora.toml"), "# mine").unwrap();
    assert_eq!(RecipeText::find("lora", folder.path()).unwrap().text, "# mine");
    assert_eq!(RecipeText::find("lora.toml", folder.path()).unwrap().text, "# mine");
}

#[test]
fn unknown_recipes_name_the_nearest() {
    let find = |name: &str| RecipeText::find(name, Path::new("/nowhere")).unwrap_err();
    assert_snapshot!(find("loar.toml"), @"
    error: cannot find recipe `loar.toml`
      caused by: no such file
      caused by: unknown built-in recipe `loar`
      caused by: built in: quickstart, pretrain-tiny, lora, qlora, qlora-8bit-optimizer, dora, full, dpo, kto, orpo, cpo, simpo, ddp-lora, fsdp-full, fsdp-qlora, hsdp-full
    hint: write `lora`
    ");
    assert_snapshot!(find("mine/best.toml"), @"
    error: cannot find recipe `mine/best.toml`
      caused by: no such file
      caused by: unknown built-in recipe `mine/best`
      caused by: built in: quickstart, pretrain-tiny, lora, qlora, qlora-8bit-optimizer, dora, full, dpo, kto, orpo, cpo, simpo, ddp-lora, fsdp-full, fsdp-qlora, hsdp-full
    hint: `finetune recipes` lists the built-in recipes and their purposes
    ");
}

#[test]
fn what_training_needs() {
    assert_snapshot!(Recipe::load(&RecipeLayers::default()).unwrap_err(), @r#"
    error: cannot use these settings
      caused by: `model.id` is not set
      caused by: `data.train` is not set
      caused by: `optimizer.learning_rate` is not set
    hint: add what is missing: `finetune --model Qwen/Qwen2.5-0.5B --dataset rows.jsonl --recipe lora`; each line of rows.jsonl is a row, such as {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}
    "#);
    let lacking = RecipeLayers {
        typed: vec!["--recipe".into(), "my.toml".into()],
        ..layers("[train]\nepochs = 2\n", &[])
    };
    assert_snapshot!(Recipe::load(&lacking).unwrap_err(), @r#"
    error: cannot use recipe my.toml
      caused by: `model.id` is not set
      caused by: `data.train` is not set
      caused by: `optimizer.learning_rate` is not set
    hint: add what is missing: `finetune --recipe my.toml --model Qwen/Qwen2.5-0.5B --dataset rows.jsonl --set optimizer.learning_rate=2e-4`; each line of rows.jsonl is a row, such as {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}
    "#);
    let other = RecipeLayers { purpose: Purpose::Other, ..RecipeLayers::default() };
    assert_eq!(Recipe::load(&other).unwrap(), Recipe::default());
}

#[test]
fn unknown_names() {
    assert_snapshot!(fault("[train]\nepoch = 3\n"), @"
    error: cannot use recipe my.toml
      caused by: my.toml:8:1: unknown key `train.epoch`; nearest: `train.epochs`; [train] has: epochs, max_steps, micro_batch_size, gradient_accumulation_steps, global_batch_size, max_grad_norm, router_aux_loss, on_nan, nan_limit, neftune_alpha, seed, recompute, base_products, cuda_graphs
    hint: write `epochs`
    ");
    assert_snapshot!(fault("[train]\nlearning_rate = 3\n"), @"
    error: cannot use recipe my.toml
      caused by: my.toml:8:1: unknown key `train.learning_rate`; nearest: `optimizer.learning_rate`; [train] has: epochs, max_steps, micro_batch_size, gradient_accumulation_steps, global_batch_size, max_grad_norm, router_aux_loss, on_nan, nan_limit, neftune_alpha, seed, recompute, base_products, cuda_graphs
    hint: write `learning_rate` under `[optimizer]`
    ");
    assert_snapshot!(fault("[adapter]\nlora_r = 3\n"), @"
    error: cannot use recipe my.toml
      caused by: my.toml:8:1: unknown key `adapter.lora_r`; nearest: `adapter.r`; [adapter] has: kind, r, lora_alpha, lora_dropout, target_modules, exclude_modules, modules_to_save, rank_pattern, alpha_pattern, use_rslora, init, path
    hint: write `r`
    ");
    assert_snapshot!(fault("[train]\nzzz = 3\n"), @"
    error: cannot use recipe my.toml
      caused by: my.toml:8:1: unknown key `train.zzz`; [train] has: epochs, max_steps, micro_batch_size, gradient_accumulation_steps, global_batch_size, max_grad_norm, router_aux_loss, on_nan, nan_limit, neftune_alpha, seed, recompute, base_products, cuda_graphs
    hint: `finetune recipes show reference` documents every key
    ");
    assert_snapshot!(fault("[trian]\nepochs = 3\n"), @"
    error: cannot use recipe my.toml
      caused by: my.toml:7:2: unknown section [trian]; nearest: [train]; accepted: model, quantization, adapter, data, objective, train, optimizer, scheduler, parallel, checkpoint, eval, log, profile, alerts
    hint: write `[train]`
    ");
    assert_snapshot!(fault("[[train]]\nepochs = 3\n"), @"
    error: cannot use recipe my.toml
      caused by: my.toml:7:3: `train` is not a table; accepted: one table of keys
    hint: write `[train]` and its keys below
    ");
    assert_snapshot!(Recipe::load(&layers(&format!("epochs = 3\n{BASE}"), &[])).unwrap_err(), @"
    error: cannot use recipe my.toml
      caused by: my.toml:1:1: `epochs` is outside of any section
    hint: write `epochs` under `[train]`
    ");
}

#[test]
fn wrong_values() {
    assert_snapshot!(fault("[train]\nepochs = \"three\"\n"), @r#"
    error: cannot use recipe my.toml
      caused by: my.toml:8:10: `train.epochs` is "three"; accepted: a number above 0
    hint: `finetune recipes show reference` documents every key
    "#);
    assert_snapshot!(fault("[train]\nmax_steps = 2.5\n"), @"
    error: cannot use recipe my.toml
      caused by: my.toml:8:13: `train.max_steps` is 2.5; accepted: a whole number, at least 1
    hint: `finetune recipes show reference` documents every key
    ");
    assert_snapshot!(fault("[train]\nseed = -1\n"), @"
    error: cannot use recipe my.toml
      caused by: my.toml:8:8: `train.seed` is -1; accepted: a whole number, at least 0
    hint: `finetune recipes show reference` documents every key
    ");
    assert_snapshot!(fault("[train]\nseed = 99999999999999999999\n"), @"
    error: cannot use recipe my.toml
      caused by: my.toml:8:8: `train.seed` is 99999999999999999999; accepted: numbers below 2^63
    ");
    assert_snapshot!(fault("[train]\nmax_grad_norm = nan\n"), @"
    error: cannot use recipe my.toml
      caused by: my.toml:8:17: `train.max_grad_norm` is NaN; accepted: a number, at least 0
    hint: `finetune recipes show reference` documents every key
    ");
    assert_snapshot!(fault("[log]\ntensorboard = \"yes\"\n"), @r#"
    error: cannot use recipe my.toml
      caused by: my.toml:8:15: `log.tensorboard` is "yes"; accepted: true, false
    hint: `finetune recipes show reference` documents every key
    "#);
    assert_snapshot!(fault("[profile]\nwait = -1\nactive = 2\n"), @"
    error: cannot use recipe my.toml
      caused by: my.toml:8:8: `profile.wait` is -1; accepted: a whole number, at least 0
    hint: `finetune recipes show reference` documents every key
    ");
    assert_snapshot!(fault("[profile]\nwarmup = 3\nrepeat = 2\n"), @"
    error: cannot use recipe my.toml
      caused by: my.toml:8:10: `profile.warmup` has no effect with `active = 0`, which disables tracing
      caused by: my.toml:9:10: `profile.repeat` has no effect with `active = 0`, which disables tracing
    hint: write `active = 3` under `[profile]`, for example, or remove `warmup`; write `active = 3` under `[profile]`, for example, or remove `repeat`
    ");
    assert_snapshot!(fault("[model.revision]\nbranch = \"main\"\n"), @r#"
    error: cannot use recipe my.toml
      caused by: my.toml:7:1: `model.revision` is { "branch" = "main" }; accepted: a string
    hint: `finetune recipes show reference` documents every key
    "#);
    assert_snapshot!(fault("[scheduler]\nkind = \"cosin\"\n"), @r#"
    error: cannot use recipe my.toml
      caused by: my.toml:8:8: `scheduler.kind` is "cosin"; accepted: "cosine", "linear", "constant", "constant_with_warmup", "cosine_with_restarts", "cosine_with_min_lr", "polynomial", "inverse_sqrt", "warmup_stable_decay"
    hint: write `kind = "cosine"`
    "#);
    assert_snapshot!(fault("[checkpoint]\noutput_dtype = 16\n"), @r#"
    error: cannot use recipe my.toml
      caused by: my.toml:8:16: `checkpoint.output_dtype` is 16; accepted: "auto", "f32", "bf16", "f16"
    hint: `finetune recipes show reference` documents every key
    "#);
    assert_snapshot!(fault("[adapter]\ntarget_modules = \"q_proj\"\n"), @r#"
    error: cannot use recipe my.toml
      caused by: my.toml:8:18: `adapter.target_modules` is "q_proj"; accepted: "all-linear", a list of module names such as ["q_proj", "v_proj"], a regular expression for whole names such as ".*(q|v)_proj"
    hint: `finetune recipes show reference` documents every key
    "#);
    assert_snapshot!(fault("[adapter]\ntarget_modules = []\n"), @"
    error: cannot use recipe my.toml
      caused by: my.toml:8:18: `adapter.target_modules` is []: an empty list trains nothing
    ");
    assert_snapshot!(fault("[adapter]\nexclude_modules = [1]\n"), @"
    error: cannot use recipe my.toml
      caused by: my.toml:8:19: `adapter.exclude_modules` is [1]; accepted: a list of strings
    hint: `finetune recipes show reference` documents every key
    ");
    assert_snapshot!(fault("[adapter]\nrank_pattern = { q_proj = 0 }\n"), @r#"
    error: cannot use recipe my.toml
      caused by: my.toml:8:16: `adapter.rank_pattern` is { "q_proj" = 0 }; accepted: a table from module names to numbers, each a whole number from 1 to 65536
    hint: `finetune recipes show reference` documents every key
    "#);
    assert_snapshot!(Recipe::load(&layers(&BASE.replace("\"org/m\"", "\"\""), &[])).unwrap_err(), @"
    error: cannot use recipe my.toml
      caused by: `model.id` is not set
    hint: add what is missing: `finetune --model Qwen/Qwen2.5-0.5B`
    ");
    assert_snapshot!(Recipe::load(&layers(&BASE.replace("\"org/d\"", "\"rows.jsonl\", \"\""), &[])).unwrap_err(), @r#"
    error: cannot use recipe my.toml
      caused by: my.toml:4:9: `data.train` is ["rows.jsonl", ""]: no such file or folder: /nowhere/rows.jsonl
    "#);
    assert_snapshot!(fault(&format!("[adapter]\npath = [\"{}\"]\n", "x".repeat(100))), @r#"
    error: cannot use recipe my.toml
      caused by: my.toml:8:8: `adapter.path` is ["xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx…; accepted: a path, a hub id
    hint: `finetune recipes show reference` documents every key
    "#);
}

#[test]
fn wrong_ranges() {
    assert_snapshot!(fault("[adapter]\nr = 0\nlora_dropout = 1.0\nlora_alpha = 0\n"), @"
    error: cannot use recipe my.toml
      caused by: my.toml:8:5: `adapter.r` is 0; accepted: a whole number from 1 to 65536
      caused by: my.toml:9:16: `adapter.lora_dropout` is 1.0; accepted: a number from 0 to below 1
      caused by: my.toml:10:14: `adapter.lora_alpha` is 0; accepted: a number above 0
    hint: `finetune recipes show reference` documents every key
    ");
    assert_snapshot!(Recipe::load(&layers(&BASE.replace("1e-3", "0"), &[])).unwrap_err(), @"
    error: cannot use recipe my.toml
      caused by: my.toml:6:17: `optimizer.learning_rate` is 0; accepted: a number above 0
    hint: `finetune recipes show reference` documents every key
    ");
    assert_snapshot!(Recipe::load(&layers(&BASE.replace("1e-3", "inf"), &[])).unwrap_err(), @"
    error: cannot use recipe my.toml
      caused by: my.toml:6:17: `optimizer.learning_rate` is inf; accepted: a number above 0
    hint: `finetune recipes show reference` documents every key
    ");
    assert_snapshot!(
        fault("[train]\nepochs = 0\nmax_steps = 0\nmicro_batch_size = 0\ngradient_accumulation_steps = 0\n"),
        @r#"
    error: cannot use recipe my.toml
      caused by: my.toml:8:10: `train.epochs` is 0; accepted: a number above 0
      caused by: my.toml:9:13: `train.max_steps` is 0; accepted: a whole number, at least 1
      caused by: my.toml:10:20: `train.micro_batch_size` is 0; accepted: "auto", a whole number from 1 to 65536
      caused by: my.toml:11:31: `train.gradient_accumulation_steps` is 0; accepted: "auto", a whole number from 1 to 1048576
    hint: `finetune recipes show reference` documents every key
    "#
    );
    assert_snapshot!(fault("[scheduler]\nwarmup_ratio = 1.5\n[checkpoint]\nkeep_last = 0\n"), @"
    error: cannot use recipe my.toml
      caused by: my.toml:8:16: `scheduler.warmup_ratio` is 1.5; accepted: a number from 0 to 1
      caused by: my.toml:10:13: `checkpoint.keep_last` is 0; accepted: a whole number, at least 1
    hint: `finetune recipes show reference` documents every key
    ");
    assert_snapshot!(fault("[quantization]\nblock_size = 48\n"), @"
    error: cannot use recipe my.toml
      caused by: my.toml:8:14: `quantization.block_size` is 48; accepted: a whole number: one of 32, 64, 128, 256, 512, 1024, 2048, 4096
    hint: `finetune recipes show reference` documents every key
    ");
    assert_snapshot!(Recipe::load(&layers(BASE, &["optimizer.betas=[0.9, 1]", "data.max_seq_len=1"])).unwrap_err(), @r#"
    error: cannot use these settings
      caused by: --set optimizer.betas=[0.9, 1]: `optimizer.betas` is [0.9, 1]; accepted: two numbers, each from 0 to below 1
      caused by: --set data.max_seq_len=1: `data.max_seq_len` is 1; accepted: "auto", a whole number from 2 to 16777216
    hint: `finetune recipes show reference` documents every key
    "#);
}

#[test]
fn keys_without_effect() {
    assert_snapshot!(fault("[scheduler]\nwarmup_ratio = 0.1\nwarmup_steps = 3\n"), @"
    error: cannot use recipe my.toml
      caused by: my.toml:9:16: `scheduler.warmup_steps` and `warmup_ratio` exclude each other
    hint: remove one of the two
    ");
    assert_snapshot!(fault("[scheduler]\nkind = \"constant\"\nwarmup_steps = 3\nmin_lr_ratio = 0.1\n"), @r#"
    error: cannot use recipe my.toml
      caused by: my.toml:9:16: `scheduler.warmup_steps` has no effect with `kind = "constant"`
      caused by: my.toml:10:16: `scheduler.min_lr_ratio` has no effect with `kind = "constant"`
    hint: write `kind = "constant_with_warmup"`; remove it, or write `kind = "cosine"`
    "#);
    assert_snapshot!(fault("[scheduler]\nnum_cycles = 2\npower = 2\nnum_decay_steps = 2\n"), @r#"
    error: cannot use recipe my.toml
      caused by: my.toml:8:14: `scheduler.num_cycles` has no effect with `kind = "cosine"`
      caused by: my.toml:9:9: `scheduler.power` has no effect with `kind = "cosine"`
      caused by: my.toml:10:19: `scheduler.num_decay_steps` has no effect with `kind = "cosine"`
    hint: write `kind = "cosine_with_restarts"`; write `kind = "polynomial"`; write `kind = "warmup_stable_decay"`
    "#);
    assert_snapshot!(fault("[scheduler]\nkind = \"cosine_with_min_lr\"\n"), @r#"
    error: cannot use recipe my.toml
      caused by: `scheduler.min_lr_ratio` is not set, but `kind = "cosine_with_min_lr"` needs it
    hint: write `min_lr_ratio = 0.1` or `kind = "cosine"`
    "#);
    assert_snapshot!(fault("[scheduler]\nkind = \"warmup_stable_decay\"\n"), @r#"
    error: cannot use recipe my.toml
      caused by: `scheduler.num_decay_steps` is not set, but `kind = "warmup_stable_decay"` needs it
    hint: write `num_decay_steps = 100`, for example
    "#);
    assert_snapshot!(fault("[adapter]\ninit = \"loftq\"\n"), @r#"
    error: cannot use recipe my.toml
      caused by: my.toml:8:8: `adapter.init` is "loftq", which needs a quantized base
    hint: add `[quantization]`, or remove `init`
    "#);
    assert_snapshot!(fault("[adapter]\ninit = \"pissa\"\npath = \"org/adapter\"\n"), @"
    error: cannot use recipe my.toml
      caused by: my.toml:8:8: `adapter.init` has no effect with `path`: a saved adapter brings its own weights
    hint: remove `init` or `path`
    ");
    assert_snapshot!(set_fault(&["optimizer.lora_plus_ratio=16", "eval.steps=5"]), @"
    error: cannot use these settings
      caused by: --set optimizer.lora_plus_ratio=16: `optimizer.lora_plus_ratio` has no effect without [adapter]
      caused by: --set eval.steps=5: `eval.steps` has no effect without `data.eval` or `data.eval_split`
    hint: add `[adapter]`, or remove `lora_plus_ratio`; add `--eval-dataset DATASET`, or write `data.eval_split = 0.05`
    ");
    assert_snapshot!(set_fault(&["optimizer.master=none", "adapter.r=4"]), @"
    error: cannot use these settings
      caused by: --set optimizer.master=none: `optimizer.master` has no effect with [adapter]: adapter weights always have f32 masters
    hint: remove `master`
    ");
    assert_snapshot!(set_fault(&["optimizer.master=none", "model.dtype=f32"]), @r#"
    error: cannot use these settings
      caused by: --set optimizer.master=none: `optimizer.master` has no effect with `model.dtype = "f32"`: f32 weights need no masters
    hint: write `dtype = "bf16"` under `[model]`, or remove `master`
    "#);
    assert_snapshot!(set_fault(&["checkpoint.keep_every=250", "checkpoint.save_steps=100"]), @"
    error: cannot use these settings
      caused by: --set checkpoint.keep_every=250: `checkpoint.keep_every` is 250; accepted: a multiple of `save_steps`, which is 100
    hint: write `keep_every = 300`
    ");
    assert_snapshot!(set_fault(&["checkpoint.keep_every=250"]), @"
    error: cannot use these settings
      caused by: --set checkpoint.keep_every=250: `checkpoint.keep_every` needs a number of steps between checkpoints in `save_steps`
    hint: write `save_steps = 250`, or remove `keep_every`
    ");
    assert_snapshot!(set_fault(&["parallel.strategy=ddp", "parallel.shard_size=4"]), @r#"
    error: cannot use these settings
      caused by: --set parallel.shard_size=4: `parallel.shard_size` has no effect with `strategy = "ddp"`
    hint: write `strategy = "hsdp"`, or remove `shard_size`
    "#);
    assert_snapshot!(set_fault(&["model.id=builtin:quickstart", "model.revision=v2"]), @"
    error: cannot use these settings
      caused by: --set model.revision=v2: `model.revision` has no effect with a model that is not on the hub
    hint: remove `revision`
    ");
}

#[test]
fn broken_toml() {
    assert_snapshot!(fault("[train]\nepochs = 1\nepochs = 2\n"), @"
    error: cannot use recipe my.toml
      caused by: my.toml:9:1: `epochs` is set twice
    hint: remove one of the two
    ");
    assert_snapshot!(fault("[train\nepochs = 1\n"), @"
    error: cannot use recipe my.toml
      caused by: my.toml:7:7: not TOML: unclosed table, expected `]`
    ");
    assert_snapshot!(fault("[train]\nepochs = \n"), @"
    error: cannot use recipe my.toml
      caused by: my.toml:8:10: not TOML: no value after `=`
    ");
    assert_snapshot!(fault("[log]\ntensorboard = yes\n"), @r#"
    error: cannot use recipe my.toml
      caused by: my.toml:8:15: not TOML: yes is not a value
    hint: write "yes" for a text, true or false for a switch
    "#);
    assert_snapshot!(fault("[train]\nseed = \"abc\n"), @r#"
    error: cannot use recipe my.toml
      caused by: my.toml:8:12: not TOML: invalid basic string, expected `"`
    "#);
    assert_snapshot!(fault("[train]\nepochs: 3\n"), @"
    error: cannot use recipe my.toml
      caused by: my.toml:8:7: not TOML: invalid unquoted key, expected letters, numbers, `-`, `_`
      caused by: my.toml:8:9: not TOML: key with no value, expected `=`
    ");
}

#[test]
fn mistyped_assignments() {
    assert_snapshot!(set_fault(&["train.epoch=3"]), @"
    error: cannot use these settings
      caused by: --set train.epoch=3: unknown key `train.epoch`; nearest: `train.epochs`; [train] has: epochs, max_steps, micro_batch_size, gradient_accumulation_steps, global_batch_size, max_grad_norm, router_aux_loss, on_nan, nan_limit, neftune_alpha, seed, recompute, base_products, cuda_graphs
    hint: write `epochs`
    ");
    assert_snapshot!(set_fault(&["trian.epochs=3"]), @"
    error: cannot use these settings
      caused by: --set trian.epochs=3: unknown section [trian]; nearest: [train]; accepted: model, quantization, adapter, data, objective, train, optimizer, scheduler, parallel, checkpoint, eval, log, profile, alerts
    hint: write `[train]`
    ");
    assert_snapshot!(set_fault(&["epochs=3"]), @"
    error: cannot use these settings
      caused by: --set epochs=3: accepted: section.key=value
    hint: write `--set train.epochs=3`, for example
    ");
    assert_snapshot!(set_fault(&["train.epochs"]), @"
    error: cannot use these settings
      caused by: --set train.epochs: accepted: section.key=value
    hint: write `--set train.epochs=3`, for example
    ");
    assert_snapshot!(set_fault(&["train.epochs=many"]), @r#"
    error: cannot use these settings
      caused by: --set train.epochs=many: `train.epochs` is "many"; accepted: a number above 0
    hint: `finetune recipes show reference` documents every key
    "#);
    assert_snapshot!(set_fault(&["adapter.rank_pattern.q_proj=8"]), @"
    error: cannot use these settings
      caused by: --set adapter.rank_pattern.q_proj=8: unknown key `adapter.rank_pattern.q_proj`; nearest: `adapter.rank_pattern`; [adapter] has: kind, r, lora_alpha, lora_dropout, target_modules, exclude_modules, modules_to_save, rank_pattern, alpha_pattern, use_rslora, init, path
    hint: write `rank_pattern`
    ");
    let mut flags = layers(BASE, &[]);
    flags.train = vec!["./rows.jsonl".into()];
    flags.model = Some(String::new());
    assert_snapshot!(Recipe::load(&flags).unwrap_err(), @"
    error: cannot use recipe my.toml
      caused by: --dataset: no such file or folder: /nowhere/rows.jsonl
      caused by: `model.id` is not set
    hint: add what is missing: `finetune --model Qwen/Qwen2.5-0.5B`
    ");
}

#[test]
fn all_faults_at_once() {
    let text = "[model]\nid = \"org/m\"\ndtype = \"bf61\"\n\n[adapter]\nrank = 8\nr = 0\n\n[optimizer]\n\
                learning_rate = \"1e-4\"\nlearning_rate = 1e-4\n\n[scheduler]\nnum_cycles = 3\n\n[lgo]\n";
    let mut layers = layers(text, &["train.epochs=0"]);
    layers.eval = vec!["held-out.jsonl".into()];
    assert_snapshot!(Recipe::load(&layers).unwrap_err(), @r#"
    error: cannot use recipe my.toml
      caused by: my.toml:11:1: `learning_rate` is set twice
      caused by: my.toml:3:9: `model.dtype` is "bf61"; accepted: "auto", "f32", "bf16"
      caused by: my.toml:6:1: unknown key `adapter.rank`; nearest: `adapter.r`; [adapter] has: kind, r, lora_alpha, lora_dropout, target_modules, exclude_modules, modules_to_save, rank_pattern, alpha_pattern, use_rslora, init, path
      caused by: my.toml:7:5: `adapter.r` is 0; accepted: a whole number from 1 to 65536
      caused by: my.toml:10:17: `optimizer.learning_rate` is "1e-4"; accepted: a number above 0
      caused by: my.toml:16:2: unknown section [lgo]; nearest: [log]; accepted: model, quantization, adapter, data, objective, train, optimizer, scheduler, parallel, checkpoint, eval, log, profile, alerts
      caused by: --eval-dataset: no such file or folder: /nowhere/held-out.jsonl
      caused by: --set train.epochs=0: `train.epochs` is 0; accepted: a number above 0
      caused by: my.toml:14:14: `scheduler.num_cycles` has no effect with `kind = "cosine"`
    hint: remove one of the two; write `dtype = "bf16"`; write `r`; write `[log]`; write `kind = "cosine_with_restarts"`; `finetune recipes show reference` documents every key
    "#);
}

#[test]
fn a_key_of_a_higher_layer_overrules_one_of_a_lower_layer() {
    for recipe in BUILT_IN.iter().filter(|recipe| recipe.name != "pretrain-tiny") {
        let layers = RecipeLayers {
            recipe: Some(RecipeText::find(recipe.name, Path::new("/nowhere")).unwrap()),
            model: Some("org/m".into()),
            train: vec!["org/d".into()],
            set: vec!["scheduler.kind=constant".into()],
            folder: "/nowhere".into(),
            ..RecipeLayers::default()
        };
        let recipe = Recipe::load(&layers).map_err(|error| format!("{}: {error}", recipe.name)).unwrap();
        assert_eq!((recipe.scheduler.warmup_ratio, recipe.scheduler.kind), (None, SchedulerKind::Constant));
        let [line] = recipe.written.overruled() else { panic!("{:?}", recipe.written) };
        assert!(
            line.ends_with(
                "`scheduler.warmup_ratio` has no effect with `kind = \"constant\"` (--set scheduler.kind=constant), and is ignored"
            ),
            "{line}"
        );
    }
    let warm = "[scheduler]\nwarmup_ratio = 0.1\n";
    assert!(load(&format!("{BASE}{warm}"), &[]).written.overruled().is_empty());
    // Keys of one layer contradict each other; a lower layer overrides nothing.
    fault(&format!("{warm}kind = \"constant\"\n"));
    set_fault(&["scheduler.kind=constant", "scheduler.warmup_ratio=0.1"]);
    let constant = format!("{BASE}[scheduler]\nkind = \"constant\"\n");
    assert!(Recipe::load(&layers(&constant, &["scheduler.warmup_ratio=0.1"])).is_err());
    // Other keys follow the same rule.
    let nan = format!("{BASE}[train]\non_nan = \"skip\"\nnan_limit = 9\n");
    let recipe = load(&nan, &["train.on_nan=stop"]);
    assert_eq!((recipe.train.nan_limit, recipe.written.overruled().len()), (3, 1));
}

#[test]
fn the_rows_of_a_step_are_given_one_way() {
    let text = format!("{BASE}[train]\ngradient_accumulation_steps = 4\n");
    let recipe = load(&text, &["train.global_batch_size=32"]);
    assert_eq!((recipe.train.global_batch_size, recipe.train.accumulation()), (Some(32), 1));
    let text = format!("{BASE}[train]\nglobal_batch_size = 32\n");
    let recipe = load(&text, &["train.gradient_accumulation_steps=1"]);
    assert_eq!((recipe.train.global_batch_size, recipe.train.accumulation()), (None, 1));
    let auto = format!("{text}gradient_accumulation_steps = \"auto\"\n");
    assert_eq!(load(&auto, &[]).train.global_batch_size, Some(32));
    assert_snapshot!(fault("[train]\nglobal_batch_size = 32\ngradient_accumulation_steps = 1\n"), @"
    error: cannot use recipe my.toml
      caused by: my.toml:8:21: `train.global_batch_size` and `gradient_accumulation_steps` exclude each other
    hint: remove one of the two
    ");
}

prop_compose! {
    fn adapters()(
        r in 1_usize..1000,
        lora_alpha in 1e-3..1e3,
        lora_dropout in 0.0..0.99,
        names in proptest::collection::vec("[a-z_.]{1,12}", 0..4),
        ranks in proptest::collection::vec(("[a-z0-9_.^$|]{1,12}", 1_usize..99), 0..4),
        use_rslora: bool,
    ) -> AdapterSection {
        let mut seen = std::collections::BTreeSet::new();
        AdapterSection {
            r,
            lora_alpha,
            lora_dropout,
            target_modules: if names.is_empty() {
                TargetModules::AllLinear
            } else {
                TargetModules::Named(names.clone())
            },
            modules_to_save: names,
            rank_pattern: Patterns(ranks.into_iter().filter(|(name, _)| seen.insert(name.clone())).collect()),
            use_rslora,
            ..AdapterSection::default()
        }
    }
}

prop_compose! {
    fn recipes()(
        adapter in proptest::option::of(adapters()),
        ids in proptest::collection::vec("[a-z]{1,8}/[A-Z]{1,8}", 1..4),
        template in proptest::option::of(r#"[ -~\n\té"\\]{0,40}"#),
        learning_rate in 1e-12..1.0,
        (beta1, beta2, eps) in (0.0..1.0, 0.0..1.0, 1e-300..1.0),
        (seed, max_steps) in (0..i64::MAX as u64, proptest::option::of(1_u64..1000)),
        warmup_ratio in proptest::option::of(0.0..1.0),
        kind in proptest::sample::select(SchedulerKind::ALL),
    ) -> Recipe {
        let mut recipe = Recipe { adapter, ..Recipe::default() };
        recipe.model.id = Some(DataSource::Builtin(ids[0].clone()));
        recipe.data.train = ids.into_iter().map(|id| DataSource::Hub(id).into()).collect();
        recipe.data.on_long_row = OnLongRow::Drop;
        recipe.data.chat_template = template.map(|text| Template::of_text(format!("{{{{ x }}}}{text}")));
        recipe.optimizer.learning_rate = Some(learning_rate);
        recipe.optimizer.betas = [beta1, beta2];
        recipe.optimizer.eps = eps;
        recipe.train.seed = seed;
        recipe.train.max_steps = max_steps;
        recipe.scheduler.kind = kind;
        recipe.scheduler.warmup_ratio = warmup_ratio.filter(|_| kind.has_warmup());
        recipe.scheduler.min_lr_ratio = if kind.has_floor() { 0.25 } else { 0.0 };
        recipe.scheduler.num_decay_steps = (kind == SchedulerKind::WarmupStableDecay).then_some(7);
        recipe.parallel.strategy = Strategy::Ddp;
        recipe.log.metrics_address = max_steps.map(|port| ListenAddress(([127, 0, 0, 1], port as u16).into()));
        recipe.log.command = max_steps.map(|step| CommandLine(vec!["python3".into(), format!("{step}/\"a b\"")]));
        recipe.log.peak_tflops = Some(learning_rate);
        recipe
    }
}

proptest! {
    #[test]
    fn a_resolved_recipe_reads_back_to_the_bit(recipe in recipes()) {
        let read = Recipe::load(&layers(&recipe.to_toml(), &[])).unwrap();
        prop_assert_eq!(read, recipe);
    }

    #[test]
    fn no_text_makes_it_panic(text in "[\\[\\]a-z=\\. \\n\"'{}0-9,#-]{0,80}", set in "[a-z.=\\[\"{]{0,20}") {
        let _ = Recipe::load(&layers(&text, &[&set]));
    }
}

#[test]
fn the_resolved_recipe_in_full() {
    assert_snapshot!(load(&format!("{BASE}[adapter]\nalpha_pattern = {{ q_proj = 4 }}\n"), &[]).to_toml(), @r#"
    [model]
    id = "org/m"
    revision = "main"
    init = "pretrained"
    dtype = "auto"
    dequantize = true
    attention = "flash"
    new_tokens = []

    [adapter]
    kind = "lora"
    r = 16
    lora_alpha = 32.0
    lora_dropout = 0.0
    target_modules = "all-linear"
    exclude_modules = []
    modules_to_save = []
    rank_pattern = {}
    alpha_pattern = { "q_proj" = 4.0 }
    use_rslora = false
    init = "default"

    [data]
    train = ["org/d"]
    eval = []
    format = "auto"
    max_seq_len = "auto"
    packing = true
    shuffle = true
    train_on = "assistant"
    on_bad_row = "stop"
    on_long_row = "truncate"
    sanitize_control_tokens = false

    [objective]
    kind = "cross_entropy"
    beta = 0.1
    label_smoothing = 0.0
    f_divergence_type = "reverse_kl"
    f_alpha_divergence_coef = 0.5
    use_weighting = false
    discopop_tau = 0.05
    precompute_ref_log_probs = false
    desirable_weight = 1.0
    undesirable_weight = 1.0
    cpo_alpha = 1.0
    simpo_gamma = 0.5

    [train]
    epochs = 3.0
    micro_batch_size = 1
    gradient_accumulation_steps = 1
    max_grad_norm = 1.0
    router_aux_loss = 0.0
    on_nan = "stop"
    nan_limit = 3
    neftune_alpha = 0.0
    seed = 0
    recompute = "auto"
    base_products = "dtype"
    cuda_graphs = false

    [optimizer]
    kind = "adamw"
    learning_rate = 0.001
    betas = [0.9, 0.999]
    eps = 1e-8
    weight_decay = 0.0
    state = "f32"
    master = "f32"
    lora_plus_ratio = 1.0

    [scheduler]
    kind = "cosine"
    min_lr_ratio = 0.0
    num_cycles = 1
    power = 1.0

    [parallel]
    strategy = "auto"
    offload = "none"
    reduce_dtype = "f32"

    [checkpoint]
    save_steps = "auto"
    keep_last = 2
    async_save = true
    output_dtype = "auto"

    [eval]
    steps = "auto"
    at_end = true
    keep_best = false
    samples = 0

    [log]
    every_steps = 1
    tensorboard = true

    [profile]
    wait = 1
    warmup = 1
    active = 0
    repeat = 1

    [alerts]
    "#);
}

use super::*;

#[test]
fn the_types_hold_together() {
    use clap::CommandFactory;
    Cli::command().debug_assert();
}

#[test]
fn gpus_in_words() {
    let read = |text: &str| text.parse::<Gpus>().map(|gpus| gpus.0);
    assert_eq!(read("0").unwrap(), [0]);
    assert_eq!(read("2,0").unwrap(), [2, 0]);
    assert_eq!(read("0-2,5").unwrap(), [0, 1, 2, 5]);
    for wrong in ["", "a", "3-1", "0,0", "0-2,1", "-1", "0-99999999999"] {
        assert!(read(wrong).is_err(), "{wrong}");
    }
}

#[test]
fn a_mistyped_verb_is_not_training() {
    for line in
        [&["finetune", "merg"][..], &["finetune", "--recipe", "lora", "merge"], &["finetune", "x.toml"]]
    {
        assert!(Cli::try_parse_from(line).is_err(), "{line:?}");
    }
}

/// Threads of one process need GPUs, and several of them. `verify-resume` kills all ranks at once.
#[test]
fn gpus_in_one_process() {
    let parse = |line: &[&str]| Cli::try_parse_from(line);
    assert!(parse(&["finetune", "--recipe", "r", "--gpus-in-process"]).is_err());
    for (gpus, is_fine) in [("0", false), ("0-1", true)] {
        let train = parse(&["finetune", "--recipe", "r", "--gpus", gpus, "--gpus-in-process"]).unwrap().train;
        assert_eq!(train.check_devices().is_ok(), is_fine, "{gpus}");
    }
    for (gpus, is_in_process) in [("0", false), ("0,2", true)] {
        let verb = parse(&["finetune", "verify-resume", "--recipe", "r", "--gpus", gpus]).unwrap().verb;
        let Some(Verb::VerifyResume(args)) = verb else { panic!("another verb") };
        let words = args.train_words("out".as_ref(), &[]);
        assert_eq!(words.iter().any(|word| word == "--gpus-in-process"), is_in_process, "{gpus}");
    }
}

#[test]
fn resume_with_and_without_a_folder() {
    let resume = |line: &[&str]| Cli::try_parse_from(line).unwrap().train.resume;
    assert_eq!(resume(&["finetune", "--recipe", "r"]), None);
    assert_eq!(resume(&["finetune", "--resume", "--recipe", "r"]), Some(None));
    assert_eq!(resume(&["finetune", "--resume", "out"]), Some(Some("out".into())));
}

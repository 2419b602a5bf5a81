//! Ranks from the environment of each launcher.

use std::ffi::OsString;

use finetune::collective::launch::{Flags, Launch, LaunchSource, LocalRank};
use finetune::error::{Error, ErrorCategory, Result};
use finetune::rendezvous::Master;

fn detect(flags: &Flags, variables: &[(&str, &str)]) -> Result<Launch> {
    Launch::detect(flags, &|name| {
        variables.iter().rev().find(|(other, _)| *other == name).map(|(_, value)| OsString::from(value))
    })
}

fn launch(variables: &[(&str, &str)]) -> Launch {
    detect(&Flags::default(), variables).unwrap()
}

fn refused(variables: &[(&str, &str)]) -> String {
    text(detect(&Flags::default(), variables).unwrap_err())
}

fn text(error: Error) -> String {
    assert_eq!(error.kind(), ErrorCategory::User);
    error.to_string()
}

fn with<'a>(base: &[(&'a str, &'a str)], more: &[(&'a str, &'a str)]) -> Vec<(&'a str, &'a str)> {
    [base, more].concat()
}

fn master(address: &str, port: u16, ports: u16) -> Option<Master> {
    Some(Master { address: address.to_owned(), port, ports })
}

/// Returns rank, ranks in this process, local rank and world size.
fn places(launch: &Launch) -> [usize; 4] {
    [launch.rank, launch.ranks_here, launch.local_rank, launch.world_size]
}

const TORCHRUN: &[(&str, &str)] = &[
    ("RANK", "5"),
    ("WORLD_SIZE", "8"),
    ("LOCAL_RANK", "1"),
    ("LOCAL_WORLD_SIZE", "4"),
    ("GROUP_RANK", "1"),
    ("GROUP_WORLD_SIZE", "2"),
    ("MASTER_ADDR", "node-a"),
    ("MASTER_PORT", "29500"),
    ("TORCHELASTIC_RUN_ID", "job7"),
    ("TORCHELASTIC_USE_AGENT_STORE", "True"),
];

/// The second task on the second node of three, as `srun` starts it.
const SLURM: &[(&str, &str)] = &[
    ("SLURM_JOB_ID", "1234567"),
    ("SLURM_PROCID", "3"),
    ("SLURM_LOCALID", "1"),
    ("SLURM_NODEID", "1"),
    ("SLURM_NTASKS", "5"),
    ("SLURM_NNODES", "3"),
    ("SLURM_TASKS_PER_NODE", "2(x2),1"),
    ("SLURM_JOB_NODELIST", "gpu[003-004,011]"),
    ("SLURM_STEP_ID", "2"),
    ("SLURM_STEP_NUM_TASKS", "5"),
    ("SLURM_STEP_NUM_NODES", "3"),
    ("SLURM_STEP_TASKS_PER_NODE", "2(x2),1"),
    ("SLURM_STEP_NODELIST", "gpu[003-004,011]"),
];

/// The variables that Open MPI 4.1 sets.
const OPEN_MPI: &[(&str, &str)] = &[
    ("OMPI_COMM_WORLD_RANK", "1"),
    ("OMPI_COMM_WORLD_SIZE", "2"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
    ("PMIX_RANK", "1"),
    ("PMIX_NAMESPACE", "2070216705"),
];

#[test]
fn nothing_is_needed_on_one_host() {
    let alone = launch(&[]);
    assert_eq!((alone.source, places(&alone)), (LaunchSource::Alone, [0, 1, 0, 1]));
    let four = detect(&Flags { ranks_here: Some(4), ..Flags::default() }, &[]).unwrap();
    assert_eq!((places(&four), four.local_world_size, four.master), ([0, 4, 0, 4], Some(4), None));
    // Variables of other tools mean nothing alone.
    let left =
        [("WORLD_SIZE", "1"), ("MASTER_ADDR", "x"), ("MASTER_PORT", "1"), ("LOCAL_RANK", "0"), ("RANK", "")];
    assert_eq!(launch(&left).source, LaunchSource::Alone);
    assert!(refused(&[("WORLD_SIZE", "4")]).contains("RANK is not set, although WORLD_SIZE is 4"));
    assert!(
        text(detect(&Flags { ranks_here: Some(0), ..Flags::default() }, &[]).unwrap_err())
            .contains("1 to 65536")
    );
    let flags = Flags { master_addr: Some("a".to_owned()), ..Flags::default() };
    let error = text(detect(&flags, &[]).unwrap_err());
    assert!(error.contains("neither --world-size nor --rank"), "{error}");
    assert!(error.contains("cannot use --master-addr for a run of one process"), "{error}");
    assert!(error.contains("or remove --master-addr to train with one process"), "{error}");
}

#[test]
fn flags_come_first() {
    let flags = Flags {
        ranks_here: Some(4),
        world_size: Some(16),
        rank: Some(8),
        master_addr: Some("10.0.0.1".to_owned()),
        master_port: Some(4000),
    };
    let detected = detect(&flags, TORCHRUN).unwrap();
    assert_eq!((detected.source, places(&detected)), (LaunchSource::Flags, [8, 4, 1, 16]));
    assert_eq!(detected.master, master("10.0.0.1", 4000, 1));
    let by_variable = Flags { master_addr: None, master_port: None, ..flags.clone() };
    assert_eq!(detect(&by_variable, &[("MASTER_ADDR", "a")]).unwrap().master, master("a", 29_500, 1));
    assert!(text(detect(&by_variable, &[]).unwrap_err()).contains("MASTER_ADDR is not set"));
    let one = Flags { world_size: Some(4), rank: Some(0), ..by_variable.clone() };
    assert_eq!(detect(&one, &[]).unwrap().master, None);
    let refused = [
        (Flags { rank: None, ..flags.clone() }, "--world-size without --rank"),
        (Flags { world_size: None, ..flags.clone() }, "--rank without --world-size"),
        (Flags { rank: Some(13), ..flags.clone() }, "--rank 0 to 12"),
        (Flags { world_size: Some(3), ..flags.clone() }, "--world-size 4 or more"),
        (Flags { world_size: Some(70_000), ..flags.clone() }, "1 to 65536"),
        (Flags { master_port: Some(0), ..flags.clone() }, "--master-port 0"),
        (Flags { master_addr: Some("a:4000".to_owned()), ..flags.clone() }, "without a port"),
        (Flags { master_addr: Some("0.0.0.0".to_owned()), ..flags.clone() }, "the one address"),
        (Flags { master_addr: Some("::".to_owned()), ..flags.clone() }, "the one address"),
        (Flags { master_addr: Some("a b".to_owned()), ..flags.clone() }, "--master-addr is `a b`"),
    ];
    for (flags, why) in refused {
        let error = text(detect(&flags, &[]).unwrap_err());
        assert!(error.contains(why), "{why}: {error}");
    }
    let bracketed = Flags { master_addr: Some("[fd00::1]".to_owned()), ..flags };
    assert_eq!(detect(&bracketed, &[]).unwrap().master, master("fd00::1", 4000, 1));
}

#[test]
fn torchrun_leaves_its_port_to_the_agent() {
    let detected = launch(TORCHRUN);
    assert_eq!((detected.source, places(&detected)), (LaunchSource::Torchrun, [5, 1, 1, 8]));
    assert_eq!(detected.host, Some(LocalRank { index: 1, count: 2 }));
    assert_eq!(detected.local_world_size, Some(4));
    assert_eq!((detected.master, detected.run.as_str()), (master("node-a", 29_501, 16), "job7"));
    let own = with(TORCHRUN, &[("TORCHELASTIC_USE_AGENT_STORE", "False")]);
    assert_eq!(launch(&own).master, master("node-a", 29_500, 1));
    let flags = Flags { ranks_here: Some(2), master_port: Some(4000), ..Flags::default() };
    let detected = detect(&flags, TORCHRUN).unwrap();
    assert_eq!((places(&detected), detected.local_world_size), ([10, 2, 2, 16], Some(8)));
    assert_eq!(detected.master, master("node-a", 4000, 1));
}

#[test]
fn rank_and_world_size_are_enough() {
    // A PyTorchJob or a script: each process counts as the first on its host.
    let job = [("RANK", "1"), ("WORLD_SIZE", "3"), ("MASTER_ADDR", "job-master-0"), ("MASTER_PORT", "23456")];
    let detected = launch(&job);
    assert_eq!((places(&detected), detected.host, detected.local_world_size), ([1, 1, 0, 3], None, None));
    assert_eq!(detected.master, master("job-master-0", 23_456, 1));
    let local = with(&job, &[("LOCAL_RANK", "2")]);
    assert_eq!(launch(&local).local_rank, 2);
    let spread = with(&job, &[("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "3")]);
    assert_eq!(launch(&spread).host, Some(LocalRank { index: 0, count: 1 }));
    assert_eq!(launch(&[("RANK", "0"), ("WORLD_SIZE", "1")]).master, None);
}

#[test]
fn contradicting_variables_are_named() {
    let cases: &[(&[(&str, &str)], &str)] = &[
        (&[("RANK", "x")], "RANK is `x`; accepted: a whole number from 0 to 65535"),
        (&[("RANK", "-1")], "RANK is `-1`"),
        (&[("RANK", "8")], "RANK is `8`; accepted: 0 to 7, because WORLD_SIZE is 8"),
        (&[("WORLD_SIZE", "")], "WORLD_SIZE is not set, although RANK is"),
        (&[("WORLD_SIZE", "0")], "WORLD_SIZE is `0`; accepted: a whole number from 1"),
        (&[("LOCAL_RANK", "4")], "LOCAL_RANK is `4`; accepted: 0 to 3, because LOCAL_WORLD_SIZE is 4"),
        (&[("LOCAL_RANK", "")], "LOCAL_RANK is not set, although LOCAL_WORLD_SIZE is"),
        (&[("LOCAL_WORLD_SIZE", "9")], "LOCAL_WORLD_SIZE is `9`; accepted: 1 to 8"),
        (&[("GROUP_RANK", "2")], "GROUP_RANK is `2`; accepted: 0 to 1"),
        (&[("MASTER_ADDR", "")], "MASTER_ADDR is not set"),
        (&[("MASTER_PORT", "")], "MASTER_PORT is not set"),
        (&[("MASTER_PORT", "70000")], "MASTER_PORT is `70000`; accepted: a whole number from 1 to 65535"),
        (&[("MASTER_PORT", "65530")], "MASTER_PORT is `65530`; accepted: 1 to 65519"),
        (&[("MASTER_ADDR", "tcp://a")], "MASTER_ADDR is `tcp://a`"),
        (&[("TORCHELASTIC_USE_AGENT_STORE", "maybe")], "accepted: True, False"),
    ];
    for (change, why) in cases {
        let error = refused(&with(TORCHRUN, change));
        assert!(error.contains(why), "{why}: {error}");
    }
    let port = refused(&with(TORCHRUN, &[("MASTER_PORT", "70000")]));
    assert!(port.contains("cannot use the launcher's variable MASTER_PORT"), "{port}");
    assert!(port.contains("set it to such a value in every process, or unset it"), "{port}");
}

#[test]
fn slurm_steps_are_understood() {
    let detected = launch(SLURM);
    assert_eq!((detected.source, places(&detected)), (LaunchSource::Slurm, [3, 1, 1, 5]));
    assert_eq!((detected.host, detected.local_world_size), (Some(LocalRank { index: 1, count: 3 }), Some(2)));
    // (1234567 + 2) mod 256 = 137 blocks of 16 ports from 61440 on.
    assert_eq!(detected.master, master("gpu003", 61_440 + 16 * 137, 16));
    assert_eq!(detected.run, "slurm 1234567.2");
    let named = with(SLURM, &[("MASTER_ADDR", "10.1.1.1"), ("MASTER_PORT", "4000"), ("WORLD_SIZE", "5")]);
    assert_eq!(launch(&named).master, master("10.1.1.1", 4000, 1));
    // One task a node, with its ranks as threads; a script's WORLD_SIZE may count either.
    let flags = Flags { ranks_here: Some(8), ..Flags::default() };
    for world in ["5", "40"] {
        let detected = detect(&flags, &with(SLURM, &[("WORLD_SIZE", world)])).unwrap();
        assert_eq!(places(&detected), [24, 8, 8, 40]);
    }
    // A step on part of the job.
    let part = with(
        SLURM,
        &[("SLURM_TASKS_PER_NODE", "4(x9)"), ("SLURM_JOB_NODELIST", "gpu[001-009]"), ("SLURM_NTASKS", "36")],
    );
    assert_eq!(launch(&part), launch(SLURM));
    let one = with(SLURM, &[("SLURM_PROCID", "0"), ("SLURM_LOCALID", "0"), ("SLURM_STEP_NUM_TASKS", "1")]);
    assert_eq!((launch(&one).master, launch(&one).world_size), (None, 1));
}

#[test]
fn slurm_contradictions_are_named() {
    let cases: &[(&[(&str, &str)], &str)] = &[
        (
            &[("SLURM_PROCID", "5")],
            "SLURM_PROCID is `5`; accepted: 0 to 4, because SLURM_STEP_NUM_TASKS is 5",
        ),
        (
            &[("SLURM_LOCALID", "2")],
            "SLURM_LOCALID is `2`; accepted: 0 to 1, because SLURM_STEP_TASKS_PER_NODE is 2(x2),1",
        ),
        (&[("SLURM_LOCALID", "")], "SLURM_LOCALID is not set"),
        (&[("SLURM_NODEID", "3")], "SLURM_NODEID is `3`; accepted: 0 to 2"),
        (&[("SLURM_STEP_TASKS_PER_NODE", "2(x3)")], "accepted: numbers that add up to 5"),
        (&[("SLURM_STEP_TASKS_PER_NODE", "2(x")], "cannot use SLURM_STEP_TASKS_PER_NODE"),
        (&[("SLURM_STEP_NODELIST", "gpu[003")], "cannot use SLURM_STEP_NODELIST"),
        (
            &[("SLURM_STEP_NODELIST", "gpu[003-004]")],
            "SLURM_STEP_NUM_NODES is `3`; accepted: 2, the hosts in",
        ),
        (&[("SLURM_JOB_ID", "")], "SLURM_JOB_ID is not set"),
        (&[("SLURM_JOB_ID", "x")], "SLURM_JOB_ID is `x`"),
        (
            &[("SLURM_STEP_NUM_TASKS", ""), ("SLURM_NTASKS", "")],
            "SLURM_NTASKS is not set, although SLURM_PROCID is",
        ),
        (&[("WORLD_SIZE", "7")], "WORLD_SIZE is `7`; accepted: unset, or 5: Slurm started 5 processes"),
    ];
    for (change, why) in cases {
        let error = refused(&with(SLURM, change));
        assert!(error.contains(why), "{why}: {error}");
    }
}

/// In the batch script itself SLURM_PROCID is 0, and the other tasks were never started.
#[test]
fn a_batch_script_is_not_a_step() {
    let batch = [
        ("SLURM_JOB_ID", "7"),
        ("SLURM_PROCID", "0"),
        ("SLURM_LOCALID", "0"),
        ("SLURM_NTASKS", "8"),
        ("SLURM_JOB_NUM_NODES", "1"),
        ("SLURM_JOB_NODELIST", "gpu1"),
    ];
    assert_eq!(launch(&batch).source, LaunchSource::Alone);
    let several = with(&batch, &[("SLURM_JOB_NUM_NODES", "2")]);
    let error = refused(&several);
    assert!(error.contains("SLURM_JOB_NUM_NODES is 2, but this process was not started by srun"), "{error}");
    assert!(error.contains("srun --ntasks-per-node=1"), "{error}");
}

#[test]
fn open_mpi_is_understood_also_inside_a_slurm_job() {
    let detected = launch(OPEN_MPI);
    assert_eq!((detected.source, places(&detected)), (LaunchSource::OpenMpi, [1, 1, 1, 2]));
    assert_eq!(detected.host, Some(LocalRank { index: 0, count: 1 }));
    let at = detected.master.unwrap();
    assert_eq!((at.address.as_str(), at.ports, at.port % 16), ("127.0.0.1", 16, 0));
    assert!(at.port >= 61_440);
    assert_eq!(detected.run, "2070216705");

    let spread = with(OPEN_MPI, &[("OMPI_COMM_WORLD_LOCAL_SIZE", "1"), ("OMPI_COMM_WORLD_LOCAL_RANK", "0")]);
    let error = refused(&spread);
    assert!(
        error.contains("MASTER_ADDR is not set") && error.contains("mpirun -x MASTER_ADDR=HOST"),
        "{error}"
    );
    let named = with(&spread, &[("MASTER_ADDR", "a"), ("MASTER_PORT", "4000")]);
    assert_eq!(launch(&named).master, master("a", 4000, 1));
    // mpirun's daemon is a Slurm task, whose variables its processes inherit.
    let inside =
        with(&spread, &[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "2"), ("SLURM_JOB_NODELIST", "n[1-2]")]);
    let detected = launch(&inside);
    assert_eq!(
        (detected.source, detected.rank, detected.master.unwrap().address),
        (LaunchSource::OpenMpi, 1, "n1".to_owned())
    );

    assert!(refused(&with(OPEN_MPI, &[("OMPI_COMM_WORLD_RANK", "2")])).contains("accepted: 0 to 1"));
    assert!(
        refused(&with(OPEN_MPI, &[("OMPI_COMM_WORLD_SIZE", "")])).contains("OMPI_COMM_WORLD_SIZE is not set")
    );
    assert!(
        refused(&with(OPEN_MPI, &[("OMPI_COMM_WORLD_LOCAL_RANK", "2")]))
            .contains("OMPI_COMM_WORLD_LOCAL_SIZE is 2")
    );
}

#[test]
fn pmi_launchers_are_understood() {
    let hydra = [("PMI_RANK", "3"), ("PMI_SIZE", "4"), ("MPI_LOCALRANKID", "3"), ("MPI_LOCALNRANKS", "4")];
    let detected = launch(&hydra);
    assert_eq!((detected.source, places(&detected)), (LaunchSource::Pmi, [3, 1, 3, 4]));
    assert_eq!(detected.master.unwrap().address, "127.0.0.1");
    assert!(refused(&with(&hydra, &[("PMI_SIZE", "")])).contains("PMI_SIZE is not set"));

    let pmix = [("PMIX_RANK", "1"), ("PMIX_NAMESPACE", "x"), ("MASTER_ADDR", "a")];
    let error = refused(&pmix);
    assert!(error.contains("WORLD_SIZE is not set, although PMIX_RANK is"), "{error}");
    let detected = launch(&with(&pmix, &[("WORLD_SIZE", "2")]));
    assert_eq!(
        (detected.source, places(&detected), detected.run.as_str()),
        (LaunchSource::Pmi, [1, 1, 0, 2], "x")
    );

    // srun --mpi=pmi2 sets the same values twice; Hydra inside a job sets different ones.
    let srun = with(SLURM, &[("PMI_RANK", "3"), ("PMI_SIZE", "5")]);
    assert_eq!(launch(&srun).source, LaunchSource::Slurm);
    let inside = with(SLURM, &[("PMI_RANK", "7"), ("PMI_SIZE", "8")]);
    assert_eq!((launch(&inside).source, launch(&inside).rank), (LaunchSource::Pmi, 7));
}

#[test]
fn kubernetes_indexed_jobs_are_one_run_when_they_say_so() {
    let pod = [("JOB_COMPLETION_INDEX", "2"), ("HOSTNAME", "tune-2")];
    // Array indexes may as well number independent runs.
    assert_eq!(launch(&pod).source, LaunchSource::Alone);
    let joined = with(&pod, &[("WORLD_SIZE", "4"), ("MASTER_ADDR", "tune-0.tune")]);
    let flags = Flags { ranks_here: Some(8), ..Flags::default() };
    let detected = detect(&flags, &joined).unwrap();
    assert_eq!((detected.source, places(&detected)), (LaunchSource::KubernetesIndexedJob, [16, 8, 0, 32]));
    assert_eq!(detected.host, Some(LocalRank { index: 2, count: 4 }));
    assert_eq!(detected.master, master("tune-0.tune", 29_500, 1));
    let error = refused(&with(&pod, &[("WORLD_SIZE", "4")]));
    assert!(
        error.contains("MASTER_ADDR is not set") && error.contains("MASTER_ADDR=tune-0.SERVICE"),
        "{error}"
    );
    let error = refused(&with(&joined, &[("MASTER_PORT", "0")]));
    assert!(error.contains("MASTER_PORT is `0`") && error.contains("or unset it"), "{error}");
    assert!(refused(&with(&pod, &[("MASTER_ADDR", "tune-0.tune")])).contains("WORLD_SIZE is not set"));
    assert!(
        refused(&with(&joined, &[("WORLD_SIZE", "2")]))
            .contains("JOB_COMPLETION_INDEX is `2`; accepted: 0 to 1")
    );
    // If the user maps the index to RANK, the result is the same.
    assert_eq!(launch(&with(&joined, &[("RANK", "2"), ("MASTER_PORT", "1")])).source, LaunchSource::Torchrun);
}

#[test]
fn values_of_any_kind_are_refused_in_one_line() {
    let error = refused(&[("RANK", "1\n2\u{1b}[31m")]);
    assert!(error.contains("RANK is `1 2 [31m`"), "{error}");
    let too_many = detect(&Flags { ranks_here: Some(65_536), ..Flags::default() }, SLURM).unwrap_err();
    assert!(text(too_many).contains("up to 65536 ranks"));
    #[cfg(unix)]
    {
        use std::os::unix::ffi::OsStringExt;
        let bad = |name: &str| (name == "RANK").then(|| OsString::from_vec(vec![0xff]));
        assert!(text(Launch::detect(&Flags::default(), &bad).unwrap_err()).contains("UTF-8"));
    }
}

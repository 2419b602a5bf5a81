//! Files and output of a run: metrics, event files, terminal lines, model card.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};

use finetune::report::card::{Artifact, Card, CardBase, CardData};
use finetune::report::metrics::{self, EvalReport, MetricsEntry, MetricsLog, StepReport};
use finetune::report::{EventWriter, RunListener as _, Terminal, Verbosity};

fn step(step: u64) -> StepReport {
    StepReport {
        step,
        epoch: 0.1 * step as f64,
        loss: 2.0 / step as f64,
        learning_rate: 2e-4,
        grad_norm: 0.75,
        tokens: 512,
        step_secs: 0.25,
        tokens_per_sec: 2048.0,
        peak_bytes: 1 << 30,
        data_secs: 0.001,
        forward_secs: 0.0625,
        backward_secs: 0.125,
        exposed_secs: 0.01,
        update_secs: 0.03,
        save_secs: 0.02,
        other_secs: 0.002,
        rank_secs: Vec::new(),
        mfu: None,
        hfu: None,
        objective: BTreeMap::new(),
        expert_load: Vec::new(),
    }
}

/// Metrics of an objective are a table of their own in the line, and are read back.
#[test]
fn metrics_of_the_objective_are_in_the_line() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("metrics.jsonl");
    let objective = BTreeMap::from([("accuracy".to_owned(), 0.75), ("margin".to_owned(), 0.5)]);
    let report = StepReport { objective, ..step(4) };
    MetricsLog::create(&path).unwrap().append(&report.clone().into()).unwrap();
    let line = fs::read_to_string(&path).unwrap();
    assert!(line.contains("\"objective\":{\"accuracy\":0.75,\"margin\":0.5}"), "{line}");
    assert_eq!(metrics::read(&path).unwrap(), [MetricsEntry::Step(report)]);
}

#[test]
fn metrics_lines_are_the_contract() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("metrics.jsonl");
    let mut log = MetricsLog::create(&path).unwrap();
    log.append(&step(4).into()).unwrap();
    log.append(&EvalReport::new(4, 0.0, 10).into()).unwrap();
    log.append(&StepReport { rank_secs: vec![0.5], mfu: Some(0.25), hfu: Some(0.5), ..step(4) }.into())
        .unwrap();
    log.append(&EvalReport { eval_exact_match: Some(0.5), ..EvalReport::new(4, 0.0, 10) }.into()).unwrap();
    // Read while the log is open: each line is flushed at once.
    assert_eq!(
        fs::read_to_string(&path).unwrap(),
        "{\"step\":4,\"epoch\":0.4,\"loss\":0.5,\"learning_rate\":0.0002,\"grad_norm\":0.75,\"tokens\":512,\
         \"step_secs\":0.25,\"tokens_per_sec\":2048.0,\"peak_bytes\":1073741824,\
         \"data_secs\":0.001,\"forward_secs\":0.0625,\"backward_secs\":0.125,\"exposed_secs\":0.01,\
         \"update_secs\":0.03,\"save_secs\":0.02,\"other_secs\":0.002}\n\
         {\"step\":4,\"eval_loss\":0.0,\"eval_perplexity\":1.0,\"eval_tokens\":10}\n\
         {\"step\":4,\"epoch\":0.4,\"loss\":0.5,\"learning_rate\":0.0002,\"grad_norm\":0.75,\"tokens\":512,\
         \"step_secs\":0.25,\"tokens_per_sec\":2048.0,\"peak_bytes\":1073741824,\
         \"data_secs\":0.001,\"forward_secs\":0.0625,\"backward_secs\":0.125,\"exposed_secs\":0.01,\
         \"update_secs\":0.03,\"save_secs\":0.02,\"other_secs\":0.002,\"rank_secs\":[0.5],\"mfu\":0.25,\"hfu\":0.5}\n\
         {\"step\":4,\"eval_loss\":0.0,\"eval_perplexity\":1.0,\"eval_tokens\":10,\"eval_exact_match\":0.5}\n"
    );
}

#[test]
fn metrics_come_back_to_the_bit() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("metrics.jsonl");
    let mut log = MetricsLog::create(&path).unwrap();
    let mut written = Vec::new();
    for (n, loss) in [1.0 / 3.0, 0.1 + 0.2, 5e-324, f64::MAX, 1.234_567_890_123_456_7].into_iter().enumerate()
    {
        written.push(StepReport { loss, ..step(n as u64 + 1) });
        log.append(&written.last().unwrap().clone().into()).unwrap();
    }
    // exp(800) overflows f64; JSON has no infinity.
    let eval = EvalReport::new(5, 800.0, 1);
    log.append(&eval.clone().into()).unwrap();
    let read = metrics::read(&path).unwrap();
    assert_eq!(read.len(), 6);
    for (entry, report) in read.iter().zip(&written) {
        let MetricsEntry::Step(entry) = entry else { panic!("{entry:?}") };
        assert_eq!(entry.loss.to_bits(), report.loss.to_bits());
        assert_eq!(entry, report);
    }
    assert_eq!(read[5], MetricsEntry::Eval(eval));
}

/// A step by a clock that stands still.
fn timeless(n: u64) -> StepReport {
    StepReport {
        tokens_per_sec: f64::INFINITY,
        mfu: Some(f64::INFINITY),
        hfu: Some(f64::NAN),
        rank_secs: vec![1.0, f64::NEG_INFINITY],
        other_secs: f64::NAN,
        ..step(n)
    }
}

#[test]
fn a_figure_that_is_not_finite_is_left_out_of_its_line() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("metrics.jsonl");
    let mut log = MetricsLog::create(&path).unwrap();
    for n in 1..=2 {
        log.append(&timeless(n).into()).unwrap();
    }
    let eval = EvalReport { eval_exact_match: Some(f64::NAN), ..EvalReport::new(2, 1.0, 7) };
    log.append(&eval.into()).unwrap();
    let text = fs::read_to_string(&path).unwrap();
    for word in ["null", "tokens_per_sec", "mfu", "hfu", "rank_secs", "other_secs", "eval_exact_match"] {
        assert!(!text.contains(word), "{word}: {text}");
    }
    // Without times the line is still a step, also in a resumed log.
    drop(log);
    let mut log = MetricsLog::resume(&path, 2).unwrap();
    assert_eq!((log.moved_aside(), fs::read_to_string(&path).unwrap()), (None, text));
    log.append(&step(3).into()).unwrap();
    let read = metrics::read(&path).unwrap();
    assert_eq!(read.iter().map(MetricsEntry::step).collect::<Vec<_>>(), [1, 2, 2, 3]);
    let MetricsEntry::Step(first) = &read[0] else { panic!("{:?}", read[0]) };
    assert_eq!((first.speed(), first.loss), (None, step(1).loss));
    // TensorBoard files omit it as well.
    let mut events = EventWriter::create(dir.path(), None, 1).unwrap();
    events.step(&timeless(1)).unwrap();
    let events = fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().path());
    let events = events.filter(|path| path.to_string_lossy().contains("tfevents")).collect::<Vec<_>>();
    let tags: Vec<String> = scalars(&events[0]).0.into_iter().map(|(_, tag, _)| tag).collect();
    assert_eq!(tags, ["train/loss", "train/learning_rate", "train/grad_norm"]);
}

#[test]
fn a_loss_or_norm_that_json_cannot_hold_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("metrics.jsonl");
    let mut log = MetricsLog::create(&path).unwrap();
    let error = log.append(&StepReport { grad_norm: f64::NAN, ..step(3) }.into()).unwrap_err();
    assert!(error.to_string().contains("`grad_norm` is NaN"), "{error}");
    assert_eq!(fs::read_to_string(&path).unwrap(), "");
}

#[test]
fn a_resumed_log_forgets_what_will_be_repeated() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("metrics.jsonl");
    let mut log = MetricsLog::create(&path).unwrap();
    for n in 1..=5 {
        log.append(&step(n).into()).unwrap();
        if n % 2 == 0 {
            log.append(&EvalReport::new(n, 1.0, 7).into()).unwrap();
        }
    }
    drop(log);
    let before = fs::read_to_string(&path).unwrap();
    fs::write(&path, format!("{before}{{\"step\":6,\"epo")).unwrap();

    let mut log = MetricsLog::resume(&path, 3).unwrap();
    log.append(&step(4).into()).unwrap();
    drop(log);
    let steps: Vec<u64> = metrics::read(&path).unwrap().iter().map(MetricsEntry::step).collect();
    assert_eq!(steps, [1, 2, 2, 3, 4]);
    let first_lines: String = before.split_inclusive('\n').take(4).collect();
    assert!(fs::read_to_string(&path).unwrap().starts_with(&first_lines), "kept lines must not change");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "no file is left beside the log");

    let new = dir.path().join("new.jsonl");
    MetricsLog::resume(&new, 3).unwrap();
    assert_eq!(metrics::read(&new).unwrap(), []);
}

/// Lines damaged by a power cut, and files that are no log: the run continues, and nothing is
/// deleted.
#[test]
fn a_log_that_cannot_be_read_stops_no_run() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("metrics.jsonl");
    let mut log = MetricsLog::create(&path).unwrap();
    (1..=3).for_each(|n| log.append(&step(n).into()).unwrap());
    let lines: Vec<String> = fs::read_to_string(&path).unwrap().lines().map(str::to_owned).collect();
    let zeros = "\0".repeat(300);
    let half = &lines[1][..20];
    for (n, damaged) in [
        format!("{}\n{half}\n{}\n", lines[0], lines[2]).into_bytes(),
        format!("{}\n{zeros}\n{}\n{zeros}", lines[0], lines[2]).into_bytes(),
        format!("{}\n{zeros}{}\n{}\n", lines[0], lines[1], lines[2]).into_bytes(),
        [lines[0].as_bytes(), b"\n\xff\xfe\n", lines[2].as_bytes(), b"\n"].concat(),
        format!("{}\n{{\"step\":1,\"accuracy\":0.5}}\n{}\n", lines[0], lines[2]).into_bytes(),
    ]
    .into_iter()
    .enumerate()
    {
        fs::write(&path, &damaged).unwrap();
        let mut log = MetricsLog::resume(&path, 3).unwrap();
        let note = log.moved_aside().unwrap().to_owned();
        assert!(note.contains("metrics.jsonl:2 is neither a step nor an evaluation: dropped 1"), "{note}");
        log.append(&step(4).into()).unwrap();
        let steps: Vec<u64> = metrics::read(&path).unwrap().iter().map(MetricsEntry::step).collect();
        assert_eq!(steps, [1, 3, 4]);
        assert_eq!(fs::read_to_string(&path).unwrap().lines().count(), 3, "every line is an entry");
        let aside = format!("metrics.jsonl.aside-{}", n + 1);
        assert!(note.ends_with(&aside) && fs::read(dir.path().join(aside)).unwrap() == damaged, "{note}");
    }
    // A folder at the path of the log.
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    assert!(metrics::read(&path).is_err());
    let log = MetricsLog::resume(&path, 3).unwrap();
    assert!(
        log.moved_aside().unwrap().contains(": it is not a regular file; the old file is kept as"),
        "{log:?}"
    );
    assert_eq!(fs::read(&path).unwrap(), b"");
    // A log without errors gets no note.
    assert_eq!(MetricsLog::resume(&path, 3).unwrap().moved_aside(), None);
}

/// Computes CRC-32C bit by bit, after RFC 3720 appendix B.4.
fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0_u32, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |c, _| if c & 1 == 1 { c >> 1 ^ 0x82f6_3b78 } else { c >> 1 })
    })
}

/// Returns the records of a TFRecord file, with checksums verified.
fn records(bytes: &[u8]) -> Vec<Vec<u8>> {
    let check = |data: &[u8], stored: &[u8]| {
        let crc = crc32c(data);
        let masked = crc.rotate_right(15).wrapping_add(0xa282_ead8);
        assert_eq!(masked.to_le_bytes(), stored, "checksum");
    };
    let (mut records, mut rest) = (Vec::new(), bytes);
    while !rest.is_empty() {
        let length = u64::from_le_bytes(rest[..8].try_into().unwrap()) as usize;
        check(&rest[..8], &rest[8..12]);
        let data = &rest[12..12 + length];
        check(data, &rest[12 + length..16 + length]);
        records.push(data.to_vec());
        rest = &rest[16 + length..];
    }
    records
}

#[derive(Debug, PartialEq)]
enum Field {
    Varint(u64),
    Bits64(u64),
    Bits32(u32),
    Bytes(Vec<u8>),
}

fn take<'a>(bytes: &mut &'a [u8], n: usize) -> &'a [u8] {
    let (head, tail) = bytes.split_at(n);
    *bytes = tail;
    head
}

fn varint(bytes: &mut &[u8]) -> u64 {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let byte = take(bytes, 1)[0];
        value |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            return value;
        }
    }
    panic!("varint too long")
}

/// Returns all fields of a protobuf message in order.
fn fields(mut bytes: &[u8]) -> Vec<(u64, Field)> {
    let mut fields = Vec::new();
    while !bytes.is_empty() {
        let key = varint(&mut bytes);
        let field = match key & 7 {
            0 => Field::Varint(varint(&mut bytes)),
            1 => Field::Bits64(u64::from_le_bytes(take(&mut bytes, 8).try_into().unwrap())),
            2 => {
                let length = varint(&mut bytes) as usize;
                Field::Bytes(take(&mut bytes, length).to_vec())
            }
            5 => Field::Bits32(u32::from_le_bytes(take(&mut bytes, 4).try_into().unwrap())),
            other => panic!("wire type {other}"),
        };
        fields.push((key >> 3, field));
    }
    fields
}

type Scalars = Vec<(u64, String, f32)>;

/// Returns (step, tag, value) of every scalar, and (step, field) of all other event content.
fn scalars(path: &Path) -> (Scalars, Vec<(u64, u64, Field)>) {
    let (mut scalars, mut others) = (Vec::new(), Vec::new());
    for record in records(&fs::read(path).unwrap()) {
        let mut step = None;
        for (number, field) in fields(&record) {
            match (number, field) {
                (1, Field::Bits64(time)) => assert!(f64::from_bits(time) > 1.7e9, "wall time in seconds"),
                (2, Field::Varint(value)) => step = Some(value),
                (5, Field::Bytes(summary)) => {
                    for (number, value) in fields(&summary) {
                        let (1, Field::Bytes(value)) = (number, value) else {
                            panic!("summary field {number}")
                        };
                        let value = fields(&value);
                        let [(1, Field::Bytes(tag)), (2, Field::Bits32(bits))] = &value[..] else {
                            panic!("{value:?}")
                        };
                        let tag = String::from_utf8(tag.clone()).unwrap();
                        scalars.push((step.unwrap(), tag, f32::from_bits(*bits)));
                    }
                }
                (number, field) => others.push((step.unwrap(), number, field)),
            }
        }
    }
    (scalars, others)
}

#[test]
fn event_files_read_back() {
    // The check value of CRC-32C, so that writer and parser cannot be wrong in the same way.
    assert_eq!(crc32c(b"123456789"), 0xe306_9283);
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("tensorboard");
    let mut writer = EventWriter::create(&folder, None, 1).unwrap();
    writer.step(&step(300)).unwrap();
    writer.eval(&EvalReport { eval_exact_match: Some(0.25), ..EvalReport::new(300, 0.0, 10) }).unwrap();
    let first = fs::read_dir(&folder).unwrap().next().unwrap().unwrap().path();
    let (values, others) = scalars(&first);
    let expected = [
        ("train/loss", (2.0_f64 / 300.0) as f32),
        ("train/learning_rate", 2e-4),
        ("train/grad_norm", 0.75),
        ("train/tokens_per_sec", 2048.0),
        ("eval/loss", 0.0),
        ("eval/perplexity", 1.0),
        ("eval/exact_match", 0.25),
    ];
    assert_eq!(values, expected.map(|(tag, value)| (300, tag.to_owned(), value)));
    let version = || (0, 3, Field::Bytes(b"brain.Event:2".to_vec()));
    assert_eq!(others, [version()]);

    // A resumed run: a later file, which tells TensorBoard to discard steps from 201 on.
    let mut writer = EventWriter::create(&folder, Some(200), 1).unwrap();
    writer.step(&step(201)).unwrap();
    let mut files: Vec<_> = fs::read_dir(&folder).unwrap().map(|e| e.unwrap().path()).collect();
    files.sort();
    assert_eq!(files.len(), 2);
    assert_eq!(files[0], first);
    let (values, others) = scalars(&files[1]);
    assert_eq!(values.len(), 4);
    let session_start = Field::Bytes(vec![1 << 3, 1]);
    assert_eq!(others, [version(), (201, 7, session_start)]);
}

/// A log that the test can read.
#[derive(Clone, Default)]
struct Shared(Arc<Mutex<Vec<u8>>>);

impl Write for Shared {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Shared {
    fn lines(&self) -> Vec<String> {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap().lines().map(str::to_owned).collect()
    }
}

fn short_run(verbosity: Verbosity) -> Vec<String> {
    let log = Shared::default();
    let terminal = Terminal::plain(verbosity, log.clone());
    terminal.heading("training");
    terminal.detail("seed 0");
    terminal.train_start(0, 200);
    for n in 1..=200 {
        terminal.train_step(&step(n));
    }
    terminal.train_finish();
    terminal.eval(&EvalReport { eval_token_accuracy: Some(0.123), ..EvalReport::new(200, 0.0, 3) });
    terminal.warn("the disk is nearly full");
    // Outside training no step exists.
    terminal.train_step(&step(1));
    log.lines()
}

#[test]
fn a_log_gets_plain_lines() {
    let lines = short_run(Verbosity::Normal);
    assert_eq!(lines[0], "training");
    let first = "step   1/200  loss 2.0000  lr 2.00e-4  norm 0.750  2.05K tok/s  ";
    assert!(lines[1].starts_with(first), "{}", lines[1]);
    assert!(lines[2].starts_with("step  10/200  loss 0.2000"), "{}", lines[2]);
    assert!(lines[21].starts_with("step 200/200") && lines[21].ends_with("0.0 s left"), "{}", lines[21]);
    assert_eq!(lines[22], "eval at step 200: loss 0.0000, perplexity 1.00, token accuracy 12.3 %");
    assert_eq!(lines[23], "warning: the disk is nearly full");
    assert_eq!(lines.len(), 24);
    assert!(lines.iter().all(|line| !line.contains('\x1b')));
}

#[test]
fn quiet_leaves_warnings_and_verbose_adds_details() {
    assert_eq!(short_run(Verbosity::Quiet), ["warning: the disk is nearly full"]);
    let verbose = short_run(Verbosity::Verbose);
    assert_eq!(verbose[1], "seed 0");
    assert_eq!(verbose.len(), 25);
}

#[test]
fn a_download_is_told_by_quarters() {
    let log = Shared::default();
    let terminal = Terminal::plain(Verbosity::Normal, log.clone());
    terminal.download_start("model.safetensors", 4096);
    for _ in 0..8 {
        terminal.download_advance(512);
    }
    terminal.download_finish();
    terminal.download_start("broken", 4096);
    terminal.download_finish();
    assert_eq!(
        log.lines(),
        [
            "downloading model.safetensors (4.00 KiB)",
            "model.safetensors: 1.00 KiB of 4.00 KiB",
            "model.safetensors: 2.00 KiB of 4.00 KiB",
            "model.safetensors: 3.00 KiB of 4.00 KiB",
            "downloaded model.safetensors (4.00 KiB)",
            "downloading broken (4.00 KiB)",
        ]
    );
}

#[test]
fn a_reader_that_leaves_is_no_error() {
    const CHILD: &str = "FINETUNE_TEST_WRITES_DATA";
    if std::env::var_os(CHILD).is_some() {
        let terminal = Terminal::plain(Verbosity::Quiet, io::sink());
        for _ in 0..100_000 {
            terminal.data("0123456789abcdef\n").unwrap();
        }
        std::process::exit(if terminal.reader_gone() { 42 } else { 1 });
    }
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "report::a_reader_that_leaves_is_no_error", "--nocapture"])
        .env(CHILD, "1")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    // Only after the child's harness has written its own first line, which must succeed.
    let mut first = [0_u8; 64];
    let mut stdout = child.stdout.take().unwrap();
    io::Read::read_exact(&mut stdout, &mut first).unwrap();
    drop(stdout);
    assert_eq!(child.wait().unwrap().code(), Some(42));
}

fn card() -> Card {
    Card {
        title: "out".into(),
        artifact: Artifact::Adapter,
        base: CardBase::Hub { id: "org/name".into(), commit: Some("abc123".into()) },
        tag: "lora".into(),
        method: "LoRA, r 8, on 14 modules".into(),
        train_data: vec![
            CardData { name: "rows.jsonl".into(), on_hub: false, rows: 80 },
            CardData { name: "org/rows".into(), on_hub: true, rows: 90 },
        ],
        eval_data: vec![],
        recipe: "[adapter]\nkind = \"lora\"\n# ```\n".into(),
        steps: 20,
        tokens: 12_345,
        trainable_params: 1_500_000,
        final_train_loss: Some(0.5),
        before: Some(EvalReport::new(0, 2.0, 10)),
        after: Some(EvalReport { eval_exact_match: Some(0.875), ..EvalReport::new(20, 1.0, 10) }),
        last: None,
        chat: true,
    }
}

#[test]
fn the_card_says_what_was_measured() {
    let text = card().render();
    let front = "---\nbase_model: \"org/name\"\nbase_model_relation: adapter\nlibrary_name: peft\n\
                 pipeline_tag: text-generation\ntags:\n- finetune\n- \"lora\"\ndatasets:\n- \"org/rows\"\n---\n";
    assert!(text.starts_with(front), "{text}");
    for wanted in [
        "[org/name](https://huggingface.co/org/name) at commit `abc123`",
        "trained by `finetune` (LoRA, r 8, on 14 modules): 1.50M parameters, 20 steps, 12.3K tokens.",
        "| loss (nats per token) | 2.0000 | 1.0000 |",
        "| perplexity | 7.3891 | 2.7183 |",
        "| exact match | – | 87.5 % |",
        "| `rows.jsonl` | 80 | training |",
        "finetune generate --model org/name --adapter . --chat",
        "from_pretrained(\"org/name\", revision=\"abc123\")",
        "````toml\n[adapter]\nkind = \"lora\"\n# ```\n````\n",
    ] {
        assert!(text.contains(wanted), "no `{wanted}` in\n{text}");
    }
    assert!(!text.contains("token accuracy"), "what was not measured is not shown");
}

/// No other program has a built-in base: the card's Python code loads a merged model.
#[test]
fn a_card_on_a_builtin_base_says_what_works() {
    let base = CardBase::Builtin { id: "builtin:quickstart".into() };
    let text = Card { base: base.clone(), ..card() }.render();
    assert!(!text.contains("base_model") && !text.contains("PeftModel"), "{text}");
    assert!(!text.contains("from_pretrained(\"builtin:"), "{text}");
    for wanted in [
        "An adapter in PEFT's layout for `builtin:quickstart`, a model inside the `finetune` binary, trained by",
        "finetune generate --model builtin:quickstart --adapter . --chat\n",
        "finetune merge --model builtin:quickstart --adapter . --output merged\n",
        "AutoModelForCausalLM.from_pretrained(\"merged\")\n",
    ] {
        assert!(text.contains(wanted), "no `{wanted}` in\n{text}");
    }
    let whole = Card { base, artifact: Artifact::Model, ..card() }.render();
    assert!(
        whole.contains("A language model in Hugging Face's layout made from `builtin:quickstart`"),
        "{whole}"
    );
    assert!(whole.contains("from_pretrained(\".\")") && !whole.contains("finetune merge"), "{whole}");
}

/// A local folder that a shell command calls `word`.
fn folder(path: &str, word: &str) -> CardBase {
    CardBase::Folder { name: "my-model".into(), path: path.into(), word: word.into() }
}

/// Commands work from any folder, while title and front matter use the short name.
#[test]
fn a_card_on_a_local_base_has_its_path_in_commands() {
    let text = Card { base: folder("/data 1/my-model", "'/data 1/my-model'"), ..card() }.render();
    for wanted in [
        "for the local model `my-model`, trained by",
        "\nfinetune generate --model '/data 1/my-model' --adapter . --chat\n",
        "AutoTokenizer.from_pretrained(\"/data 1/my-model\")\n",
        "AutoModelForCausalLM.from_pretrained(\"/data 1/my-model\")\n",
    ] {
        assert!(text.contains(wanted), "no `{wanted}` in\n{text}");
    }
    assert!(!text.contains("base_model"), "{text}");
    let odd = Card { base: folder("/data\n/my-model", "'/data\n/my-model'"), ..card() }.render();
    assert!(odd.contains("--model BASE --adapter . --chat\n"), "{odd}");
    assert!(odd.contains("from_pretrained(\"BASE\")") && !odd.contains("/data"), "{odd}");
}

#[test]
fn a_card_of_local_things_names_no_hub() {
    let local = Card {
        artifact: Artifact::Model,
        base: folder("/data/my-model", "/data/my-model"),
        tag: "full".into(),
        method: "all weights (full fine-tuning)".into(),
        train_data: vec![],
        before: None,
        after: None,
        chat: false,
        ..card()
    };
    let text = local.render();
    assert!(!text.contains("base_model") && !text.contains("datasets:"), "{text}");
    assert!(text.contains("library_name: transformers"));
    assert!(text.contains("made from the local model `my-model`"), "{text}");
    assert!(text.contains("nothing is known about unseen text"));
    assert!(!text.contains("peft"));
    let scratch = Card { base: CardBase::Scratch, ..local }.render();
    assert!(scratch.contains("layout trained from random weights"), "{scratch}");
}

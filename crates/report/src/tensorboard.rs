//! Writes TensorBoard event files.
//!
//! A file is a row of TFRecords (length, masked CRC-32C of the length, bytes, masked CRC-32C of the
//! bytes), each record one `tensorflow.Event` protobuf of which five fields are needed. Formats:
//! <https://github.com/tensorflow/tensorflow/blob/master/tensorflow/core/lib/io/record_writer.h>,
//! <https://github.com/tensorflow/tensorflow/blob/master/tensorflow/core/util/event.proto>.
//!
//! A resumed run adds a file that starts with a session mark; TensorBoard then drops points of
//! repeated steps in earlier files.

use std::fs::{self, File, OpenOptions};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::listener::RunListener;
use super::metrics::{EvalReport, StepReport};
use crate::error::{Error, Result};

/// An open event file.
#[derive(Debug)]
pub struct EventWriter {
    path: PathBuf,
    file: File,
    every_steps: u64,
    total_steps: u64,
}

impl EventWriter {
    /// Creates an event file in `folder`, and the folder if needed, with a point for every
    /// `every_steps`-th step and the last. With `resumed_step`, points of later steps in older
    /// files of the folder no longer count.
    ///
    /// # Errors
    /// The folder or the file cannot be made.
    pub fn create(folder: &Path, resumed_step: Option<u64>, every_steps: u64) -> Result<Self> {
        fs::create_dir_all(folder).map_err(|e| Error::io("create folder", folder, &e))?;
        let secs = now().as_secs();
        // TensorBoard reads the files of a folder by name, so a later one needs a greater name.
        for attempt in 0..10_000 {
            let path = folder.join(format!("events.out.tfevents.{secs:010}.{attempt:04}.finetune"));
            match OpenOptions::new().write(true).create_new(true).open(&path) {
                Ok(file) => {
                    let mut writer = EventWriter { path, file, every_steps, total_steps: 0 };
                    writer.event(0, &ProtoMessage::default().bytes(3, b"brain.Event:2"))?;
                    if let Some(step) = resumed_step {
                        const SESSION_START: u64 = 1;
                        let session = ProtoMessage::default().varint(1, SESSION_START);
                        writer.event(step + 1, &ProtoMessage::default().bytes(7, &session.0))?;
                    }
                    return Ok(writer);
                }
                Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => {}
                Err(e) => return Err(Error::io("write", &path, &e)),
            }
        }
        Err(Error::new(
            crate::error::ErrorCategory::Storage,
            format!("cannot start an event file in {}", folder.display()),
        )
        .because("10000 files of this second exist already"))
    }

    fn scalars(&mut self, step: u64, values: &[(&str, f64)]) -> Result<()> {
        let mut summary = ProtoMessage::default();
        for (tag, value) in values.iter().filter(|(_, value)| value.is_finite()) {
            let value = ProtoMessage::default().bytes(1, tag.as_bytes()).float(2, *value as f32);
            summary = summary.bytes(1, &value.0);
        }
        self.event(step, &ProtoMessage::default().bytes(5, &summary.0))
    }

    /// Writes one record: an `Event` of this moment and `step` with `content` as its further
    /// fields.
    fn event(&mut self, step: u64, content: &ProtoMessage) -> Result<()> {
        let mut event = ProtoMessage::default().double(1, now().as_secs_f64()).varint(2, step);
        event.0.extend_from_slice(&content.0);
        let length = (event.0.len() as u64).to_le_bytes();
        let mut record = Vec::with_capacity(event.0.len() + 16);
        record.extend_from_slice(&length);
        record.extend_from_slice(&masked_crc(&length).to_le_bytes());
        record.extend_from_slice(&event.0);
        record.extend_from_slice(&masked_crc(&event.0).to_le_bytes());
        self.file.write_all(&record).map_err(|e| Error::io("write", &self.path, &e))
    }
}

impl RunListener for EventWriter {
    fn what(&self) -> &'static str {
        "TensorBoard events"
    }

    fn begin(&mut self, _done: u64, total: u64) -> Result<()> {
        self.total_steps = total;
        Ok(())
    }

    fn step(&mut self, report: &StepReport) -> Result<()> {
        if report.step != self.total_steps && !report.step.is_multiple_of(self.every_steps) {
            return Ok(());
        }
        let own: Vec<(String, f64)> =
            report.objective.iter().map(|(name, value)| (format!("train/{name}"), *value)).collect();
        let mut values = vec![
            ("train/loss", report.loss),
            ("train/learning_rate", report.learning_rate),
            ("train/grad_norm", report.grad_norm),
            ("train/tokens_per_sec", report.tokens_per_sec),
        ];
        values.extend(own.iter().map(|(name, value)| (name.as_str(), *value)));
        self.scalars(report.step, &values)
    }

    fn eval(&mut self, report: &EvalReport) -> Result<()> {
        let own: Vec<(String, f64)> =
            report.eval_objective.iter().map(|(name, value)| (format!("eval/{name}"), *value)).collect();
        let mut values = vec![("eval/loss", report.eval_loss)];
        if report.eval_perplexity.is_finite() {
            values.push(("eval/perplexity", report.eval_perplexity));
        }
        values.extend(own.iter().map(|(name, value)| (name.as_str(), *value)));
        values.extend(report.eval_token_accuracy.map(|v| ("eval/token_accuracy", v)));
        values.extend(report.eval_exact_match.map(|v| ("eval/exact_match", v)));
        self.scalars(report.step, &values)
    }
}

fn now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// Returns the rotated checksum of a TFRecord (tensorflow/core/lib/hash/crc32c.h, `Mask`).
fn masked_crc(bytes: &[u8]) -> u32 {
    const MASK_DELTA: u32 = 0xa282_ead8;
    crc32c::crc32c(bytes).rotate_right(15).wrapping_add(MASK_DELTA)
}

/// The bytes of a protobuf message (<https://protobuf.dev/programming-guides/encoding/>), field by
/// field.
#[derive(Default)]
struct ProtoMessage(Vec<u8>);

impl ProtoMessage {
    const VARINT: u64 = 0;
    const FIXED64: u64 = 1;
    const LENGTH_DELIMITED: u64 = 2;
    const FIXED32: u64 = 5;

    fn raw_varint(mut self, mut value: u64) -> Self {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
        self
    }

    fn key(self, field: u64, wire_type: u64) -> Self {
        self.raw_varint(field << 3 | wire_type)
    }

    fn varint(self, field: u64, value: u64) -> Self {
        self.key(field, Self::VARINT).raw_varint(value)
    }

    fn double(self, field: u64, value: f64) -> Self {
        let mut message = self.key(field, Self::FIXED64);
        message.0.extend_from_slice(&value.to_le_bytes());
        message
    }

    fn float(self, field: u64, value: f32) -> Self {
        let mut message = self.key(field, Self::FIXED32);
        message.0.extend_from_slice(&value.to_le_bytes());
        message
    }

    fn bytes(self, field: u64, value: &[u8]) -> Self {
        let mut message = self.key(field, Self::LENGTH_DELIMITED).raw_varint(value.len() as u64);
        message.0.extend_from_slice(value);
        message
    }
}

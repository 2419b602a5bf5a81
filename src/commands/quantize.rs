//! `finetune quantize`: a model → its quantized checkpoint, in 4 or 8 bits.

use std::time::Instant;

use super::{terminal, working_folder};
use crate::cli::{CheckpointKind, QuantizeArgs};
use crate::error::{Error, ErrorCategory, Result};
use crate::export::quantized::{Scheme, write_quantized};
use crate::launcher::interrupt::removing_on_signals;
use crate::loading::{BaseModel, Resolver, Trains};
use crate::quant::{BlockFormat, FourBit};
use crate::recipe::{DataSource, ModelSection, QuantKind};
use crate::units;

/// Quantizes a model into a new folder.
pub(super) fn run(args: &QuantizeArgs) -> Result<()> {
    let terminal = terminal(&args.common);
    let scheme = scheme(args)?;
    let id = Some(DataSource::from_argument("--model", &args.model, &working_folder()?)?);
    let resolver = Resolver::new(args.common.offline, &terminal)?;
    let base = BaseModel::open(&ModelSection { id, ..ModelSection::default() }, None, &resolver)?;
    // Without this check, a tensor of a wrong shape would fail only when the result is loaded.
    base.check(Trains::Nothing)?;
    let files =
        base.files.as_ref().ok_or_else(|| Error::internal("the model was opened without its weights"))?;
    let start = Instant::now();
    let identity = base.whole_identity(0)?;
    let report = removing_on_signals(&args.output, &terminal, || {
        write_quantized(files, &base.config, scheme, &args.skip, &identity, &args.output, |name| {
            terminal.detail(name);
        })
    })?;
    let secs = start.elapsed().as_secs_f64();
    terminal.line(format!(
        "quantized {} to {}, copied {}: {} in {}, {} before",
        units::exact(report.quantized, "tensor"),
        args.kind,
        report.copied,
        units::bytes(report.files.iter().map(|(_, bytes)| bytes).sum()),
        args.output.display(),
        units::bytes(report.bytes_before),
    ));
    terminal.line(format!(
        "read in {}, {}/s",
        units::duration(secs),
        units::bytes((report.bytes_before as f64 / secs.max(1e-9)) as u64)
    ));
    Ok(())
}

fn scheme(args: &QuantizeArgs) -> Result<Scheme> {
    let (scheme, cause) = match args.kind {
        CheckpointKind::Blocks(QuantKind::Nf4) => return Ok(four_bits(args, FourBit::Nf4)),
        CheckpointKind::Blocks(QuantKind::Fp4) => return Ok(four_bits(args, FourBit::Fp4)),
        CheckpointKind::Blocks(QuantKind::Int8) => (
            Scheme::LlmInt8,
            "LLM.int8(), the 8-bit format that transformers loads, has one f32 scale for each row",
        ),
        CheckpointKind::Mxfp4 => (Scheme::Mxfp4, "MXFP4 has a scale of 8 bits for each 32 weights of a row"),
    };
    let flag = match (args.block_size, args.no_double_quant) {
        (Some(_), _) => "--block-size",
        (None, true) => "--no-double-quant",
        (None, false) => return Ok(scheme),
    };
    let what = format!("cannot use `{flag}` with `--kind {}`", args.kind);
    Err(Error::new(ErrorCategory::Usage, what).because(cause).hint(format!("remove `{flag}`")))
}

fn four_bits(args: &QuantizeArgs, codes: FourBit) -> Scheme {
    let block_size = args.block_size.unwrap_or(BlockFormat::default().block_size);
    Scheme::FourBits(BlockFormat { codes, block_size, double_quant: !args.no_double_quant })
}

//! The 4-bit and 8-bit formats against bitsandbytes' own bytes (tests/golden/scripts/make_golden.py, trim_quant.py).

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::path::{Path, PathBuf};

use finetune::quant::{self, Blocks, CodeKind, NESTED_BLOCK, QuantFormat, Scales};
use finetune::weights::{ModelFiles, StoredDtype};
use proptest::prelude::*;
use serde_json::Value;

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/quant")
}

struct File(ModelFiles);

impl File {
    fn open(name: &str) -> Self {
        Self::open_in(&golden(), name)
    }

    fn open_in(folder: &Path, name: &str) -> Self {
        File(ModelFiles::open_file(&folder.join(format!("{name}.safetensors"))).unwrap())
    }

    fn floats(&self, name: &str) -> Vec<f32> {
        let mut values = vec![0f32; self.0.require(name).unwrap().elements()];
        self.0.read_f32(name, &mut values).unwrap();
        values
    }

    fn bytes(&self, name: &str) -> Vec<u8> {
        self.0.bytes(name).unwrap().to_vec()
    }

    fn has(&self, name: &str) -> bool {
        self.0.info(name).is_some()
    }
}

fn cases(kind: &str) -> Vec<(String, Value)> {
    let text = std::fs::read_to_string(golden().join("cases.json")).unwrap();
    let all: serde_json::Map<String, Value> = serde_json::from_str(&text).unwrap();
    let prefix = format!("{kind}.");
    all.into_iter().filter_map(|(name, case)| Some((name.strip_prefix(&prefix)?.to_owned(), case))).collect()
}

/// Rounds as the input's dtype does: the library gives the values back in it.
fn rounded(values: Vec<f32>, dtype: StoredDtype) -> Vec<f32> {
    let round = |value: f32| match dtype {
        StoredDtype::BF16 => half::bf16::from_f32(value).to_f32(),
        StoredDtype::F16 => half::f16::from_f32(value).to_f32(),
        _ => value,
    };
    values.into_iter().map(round).collect()
}

#[test]
fn the_maps_are_bitsandbytes() {
    let maps = File::open("maps");
    assert_eq!(CodeKind::Nf4.table(), maps.floats("nf4"));
    assert_eq!(CodeKind::Fp4.table(), maps.floats("fp4"));
    assert_eq!(CodeKind::Int8.table(), maps.floats("dynamic_signed"));
    assert_eq!(quant::dynamic_signed()[..], maps.floats("dynamic_signed"));
    assert_eq!(quant::dynamic_unsigned()[..], maps.floats("dynamic_unsigned"));
}

fn four_bits(folder: &Path, kind: CodeKind, expected_cases: usize) {
    let file = File::open_in(folder, kind.name());
    let cases = cases(kind.name());
    assert_eq!(cases.len(), expected_cases);
    for (name, case) in cases {
        let tensor = |end: &str| format!("{name}.{end}");
        let input = file.floats(&tensor("input"));
        let dtype = file.0.info(&tensor("input")).unwrap().dtype;
        let block_size = case["blocksize"].as_u64().unwrap() as usize;
        let format = QuantFormat { kind, block_size, double_quant: true };
        let n = input.len();
        let mut codes = vec![0u8; format.code_bytes(n)];
        let mut absmax = vec![0f32; format.blocks(n)];
        quant::quantize(kind, block_size, &input, &mut codes, &mut absmax);
        assert_eq!(absmax, file.floats(&tensor("absmax")), "{name}: scales");
        assert_eq!(codes, file.bytes(&tensor("packed")), "{name}: codes");
        let mut values = vec![0f32; n];
        let plain = Blocks { kind, block_size, codes: &codes, scales: Scales::Plain(&absmax) };
        plain.dequantize(0, &mut values);
        if file.has(&tensor("dequant")) {
            assert_eq!(rounded(values.clone(), dtype), file.floats(&tensor("dequant")), "{name}: values");
        }

        let mut nested = vec![0u8; absmax.len()];
        let mut outer = vec![0f32; absmax.len().div_ceil(NESTED_BLOCK)];
        let offset = quant::nest(&absmax, &mut nested, &mut outer);
        assert_eq!([offset][..], file.floats(&tensor("nested.offset")), "{name}: mean");
        assert_eq!(outer, file.floats(&tensor("nested.absmax2")), "{name}: outer scales");
        // The library's CPU code misses the nearest code now and then; its CUDA code does not.
        let library = file.bytes(&tensor("nested.absmax_u8"));
        let missed = nested.iter().zip(&library).filter(|(ours, theirs)| ours != theirs).count();
        assert_eq!(
            missed,
            case["nested_codes_not_nearest"].as_u64().unwrap() as usize,
            "{name}: nested codes"
        );
        if file.has(&tensor("nested_nearest.dequant")) {
            let scales = Scales::Nested { codes: &nested, absmax: &outer, offset };
            Blocks { kind, block_size, codes: &codes, scales }.dequantize(0, &mut values);
            let wanted = file.floats(&tensor("nested_nearest.dequant"));
            assert_eq!(rounded(values.clone(), dtype), wanted, "{name}: values from nearest codes");
        }

        // From the library's codes: its values.
        let nested = library;
        let scales = Scales::Nested { codes: &nested, absmax: &outer, offset };
        let double = Blocks { kind, block_size, codes: &codes, scales };
        let scales: Vec<f32> = (0..absmax.len()).map(|block| double.scale(block)).collect();
        assert_eq!(scales, file.floats(&tensor("nested.absmax_dequant")), "{name}: scales");
        double.dequantize(0, &mut values);
        if file.has(&tensor("nested.dequant")) {
            assert_eq!(rounded(values, dtype), file.floats(&tensor("nested.dequant")), "{name}: values");
        }
    }
}

#[test]
fn nf4_is_bitsandbytes() {
    four_bits(&golden(), CodeKind::Nf4, 14);
}

#[test]
fn fp4_is_bitsandbytes() {
    four_bits(&golden(), CodeKind::Fp4, 5);
}

/// With the tensors that trim_quant.py leaves out of the repository.
#[test]
fn all_fixtures_are_met() {
    let beside = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared");
    let shared = std::env::var_os("FINETUNE_SHARED").map_or_else(beside, PathBuf::from);
    let folder = shared.join("fixtures/golden/quant");
    if !folder.exists() {
        eprintln!("SKIPPED all_fixtures_are_met: {} is not there; set FINETUNE_SHARED", folder.display());
        return;
    }
    assert!(File::open_in(&folder, "nf4").has("nested3_192x256.dequant"), "the whole set");
    four_bits(&folder, CodeKind::Nf4, 14);
    four_bits(&folder, CodeKind::Fp4, 5);
}

#[test]
fn blockwise_int8_takes_the_nearest_codes() {
    let file = File::open("int8");
    for (name, case) in cases("int8") {
        let tensor = |end: &str| format!("{name}.{end}");
        let (input, absmax) = (file.floats(&tensor("input")), file.floats(&tensor("absmax")));
        let block_size = case["blocksize"].as_u64().unwrap() as usize;
        let wanted = file.bytes(&tensor("codes_nearest"));
        let mut codes = vec![0u8; input.len()];
        if case["signed"] == true {
            let mut found = vec![0f32; absmax.len()];
            quant::quantize(CodeKind::Int8, block_size, &input, &mut codes, &mut found);
            assert_eq!(found, absmax, "{name}: scales");
            let library = file.bytes(&tensor("codes"));
            let blocks =
                Blocks { kind: CodeKind::Int8, block_size, codes: &library, scales: Scales::Plain(&absmax) };
            let mut values = vec![0f32; input.len()];
            blocks.dequantize(0, &mut values);
            assert_eq!(values, file.floats(&tensor("dequant")), "{name}: values");
        } else {
            for (i, (code, value)) in codes.iter_mut().zip(&input).enumerate() {
                *code = quant::nearest(quant::dynamic_unsigned(), value / absmax[i / block_size]);
            }
        }
        assert_eq!(codes, wanted, "{name}: codes");
    }
}

#[test]
fn rows_of_llm_int8_are_bitsandbytes() {
    let file = File::open("int8");
    let input = file.floats("vectorwise.input_f16");
    let shape = file.0.info("vectorwise.input_f16").unwrap().shape.clone();
    let (mut codes, mut absmax) = (vec![0u8; input.len()], vec![0f32; shape[0]]);
    quant::quantize(CodeKind::Int8Rows, shape[1], &input, &mut codes, &mut absmax);
    assert_eq!(absmax, file.floats("vectorwise.absmax"));
    assert_eq!(codes, file.bytes("vectorwise.rows_i8"));
}

proptest! {
    /// Any part of any tensor is that part of the whole, to the bit, and the whole is the definition.
    #[test]
    fn parts_are_parts_of_the_whole(
        seed in any::<u32>(), n in 1usize..700, block_size in 1usize..130, from in 0usize..700, len in 0usize..700,
        kind in prop::sample::select(vec![CodeKind::Nf4, CodeKind::Fp4, CodeKind::Int8]),
    ) {
        let value = |i: usize| ((i as f32 + seed as f32 * 1e-4) * 12.9898).sin() * 0.1;
        let input: Vec<f32> = (0..n).map(value).collect();
        let format = QuantFormat { kind, block_size, double_quant: false };
        let (mut codes, mut absmax) = (vec![0u8; format.code_bytes(n)], vec![0f32; format.blocks(n)]);
        quant::quantize(kind, block_size, &input, &mut codes, &mut absmax);
        let blocks = Blocks { kind, block_size, codes: &codes, scales: Scales::Plain(&absmax) };
        let code = |i: usize| match kind.bits() {
            4 if i.is_multiple_of(2) => codes[i / 2] >> 4,
            4 => codes[i / 2] & 15,
            _ => codes[i],
        };
        let whole: Vec<f32> =
            (0..n).map(|i| kind.table()[usize::from(code(i))] * absmax[i / block_size]).collect();
        let from = from.min(n);
        let mut part = vec![0f32; len.min(n - from)];
        blocks.dequantize(from, &mut part);
        prop_assert_eq!(&part[..], &whole[from..from + part.len()]);
    }
}

/// bitsandbytes' own rule for its kernels is fewer than 20 parameters off by more than 1e-5 + 1e-3 relative. Its CPU code
/// takes a neighbour of the nearest code in up to 2 % of the values.
#[test]
fn adamw_in_8_bits_follows_bitsandbytes() {
    use candle_core::{Device, Tensor};
    use finetune::optim::{MomentDtype, Moments, Optimizer, OptimizerOptions, ParamGroup};

    let file = File::open("adamw8bit");
    let text = std::fs::read_to_string(golden().join("cases.json")).unwrap();
    let case = serde_json::from_str::<Value>(&text).unwrap()["adamw8bit"].clone();
    let number = |key: &str| case[key].as_f64().unwrap();
    let tensor = |name: &str| {
        let values = file.floats(name);
        let len = values.len();
        Tensor::from_vec(values, len, &Device::Cpu).unwrap()
    };
    let param = tensor("param0");
    let piece = ParamGroup {
        param: param.clone().into(),
        grad: param.zeros_like().unwrap(),
        decay: true,
        rate: 1.0,
        large: true,
    };
    let options = OptimizerOptions {
        betas: [case["betas"][0].as_f64().unwrap(), case["betas"][1].as_f64().unwrap()],
        eps: number("eps"),
        weight_decay: number("weight_decay"),
        state: MomentDtype::Int8,
    };
    let mut optimizer = Optimizer::new(options, vec![piece.clone()]).unwrap();
    let steps = case["steps"].as_u64().unwrap();
    for step in 1..=steps {
        piece.grad.slice_set(&tensor(&format!("grad{step}")), 0, 0).unwrap();
        optimizer.update(number("lr"), 1.0).unwrap();
    }
    // The reference was taken down without copies: every step's tensors hold what the last one left.
    let wanted = file.floats(&format!("param{steps}"));
    let ours = param.to_vec1::<f32>().unwrap();
    let off = |(ours, theirs): &(&f32, &f32)| (*ours - *theirs).abs() > 1e-5 + 1e-3 * theirs.abs();
    let missed = ours.iter().zip(&wanted).filter(off).count();
    assert!(missed < 20, "{missed} of {} parameters", wanted.len());
    let largest = ours.iter().zip(&wanted).fold(0f32, |max, (ours, theirs)| max.max((ours - theirs).abs()));
    // A code beside the nearest moves an update by a few percent of the learning rate.
    assert!(largest < 1e-4, "{largest}");
    let Moments::Int8(moments) = &optimizer.moments()[0] else { panic!("32 bits") };
    for (i, moment) in moments.iter().enumerate() {
        let wanted = file.bytes(&format!("state{}.{steps}", i + 1));
        let codes = moment.codes.to_vec1::<u8>().unwrap();
        let missed = codes.iter().zip(&wanted).filter(|(ours, theirs)| ours != theirs).count();
        assert!(missed * 50 < wanted.len(), "moment {i}: {missed} codes of {}", wanted.len());
        let scales = file.floats(&format!("absmax{}.{steps}", i + 1));
        for (ours, theirs) in moment.absmax.to_vec1::<f32>().unwrap().iter().zip(scales) {
            assert!((ours - theirs).abs() <= 1e-3 * theirs.abs(), "moment {i}: {ours} {theirs}");
        }
    }
}

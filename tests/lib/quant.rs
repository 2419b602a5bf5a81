//! The 4-bit and 8-bit formats against bitsandbytes' own bytes
//! (tests/golden/scripts/make_golden.py, trim_quant.py).

use std::path::{Path, PathBuf};

use crate::skipped::skipped;
use finetune::ops::stochastic_rounding::StochasticRounding;
use finetune::quant::{
    self, BlockCodes, BlockFormat, FourBit, Int8, Int8Rows, NESTED_BLOCK, QuantScheme, RunMeaning, RunsView,
};
use finetune::recipe::enums::StateDtype;
use finetune::runtime::rng::RngStream;
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

    /// Returns an i64 tensor of counts.
    fn counts(&self, name: &str) -> Vec<usize> {
        let bytes = self.bytes(name);
        bytes.chunks(8).map(|bytes| i64::from_le_bytes(bytes.try_into().unwrap()) as usize).collect()
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

/// All 256 codes, and numbers at, beside and between their values: torch's float8_e4m3fn
/// (tests/golden/scripts/make_e4m3.py).
#[test]
fn e4m3_is_that_of_torch() {
    let text = std::fs::read_to_string(golden().join("e4m3.json")).unwrap();
    let table: Value = serde_json::from_str(&text).unwrap();
    let number = |bits: &Value| f32::from_bits(bits.as_u64().unwrap() as u32);
    let values = table["values"].as_array().unwrap();
    assert_eq!(values.len(), quant::E4M3.len());
    for (code, value) in values.iter().map(number).enumerate() {
        let ours = quant::E4M3[code];
        assert!(
            ours.to_bits() == value.to_bits() || ours.is_nan() && value.is_nan(),
            "{code}: {ours} {value}"
        );
    }
    let rounded = table["rounded"].as_array().unwrap();
    assert!(rounded.len() > 2000);
    for pair in rounded {
        let x = number(&pair[0]);
        assert_eq!(u64::from(quant::to_e4m3(x)), pair[1].as_u64().unwrap(), "{x}");
    }
}

/// Rounds to the input's dtype, in which the library returns the values.
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
    assert_eq!(FourBit::Nf4.table(), maps.floats("nf4"));
    assert_eq!(FourBit::Fp4.table(), maps.floats("fp4"));
    assert_eq!(Int8.table(), maps.floats("dynamic_signed"));
    assert_eq!(quant::dynamic_signed()[..], maps.floats("dynamic_signed"));
    assert_eq!(quant::dynamic_unsigned()[..], maps.floats("dynamic_unsigned"));
}

/// Returns the format with one f32 scale per block.
fn plain<C: BlockCodes>(codes: C, block_size: usize) -> BlockFormat<C> {
    BlockFormat { codes, block_size, double_quant: false }
}

/// Returns values `start..start + n` from codes and f32 scales.
fn part<C: BlockCodes>(
    format: BlockFormat<C>,
    codes: &[u8],
    scales: &[f32],
    start: usize,
    n: usize,
) -> Vec<f32> {
    let mut values = vec![0f32; n];
    let (codes, scales) = ([(RunMeaning::Codes, codes)], [(RunMeaning::Scales, scales)]);
    format.dequantize(&RunsView::new(codes, scales, 0.0), start, &mut values);
    values
}

fn four_bits(folder: &Path, kind: FourBit, expected_cases: usize) {
    let file = File::open_in(folder, kind.name());
    let cases = cases(kind.name());
    assert_eq!(cases.len(), expected_cases);
    for (name, case) in cases {
        let tensor = |end: &str| format!("{name}.{end}");
        let input = file.floats(&tensor("input"));
        let dtype = file.0.info(&tensor("input")).unwrap().dtype;
        let block_size = case["blocksize"].as_u64().unwrap() as usize;
        let format = plain(kind, block_size);
        let n = input.len();
        let mut codes = vec![0u8; format.code_bytes(n)];
        let mut absmax = vec![0f32; format.blocks(n)];
        format.quantize(&input, &mut codes, &mut absmax);
        assert_eq!(absmax, file.floats(&tensor("absmax")), "{name}: scales");
        assert_eq!(codes, file.bytes(&tensor("packed")), "{name}: codes");
        let mut values = part(format, &codes, &absmax, 0, n);
        if file.has(&tensor("dequant")) {
            assert_eq!(rounded(values.clone(), dtype), file.floats(&tensor("dequant")), "{name}: values");
        }

        let mut nested = vec![0u8; absmax.len()];
        let mut outer = vec![0f32; absmax.len().div_ceil(NESTED_BLOCK)];
        let offset = quant::nest(&absmax, &mut nested, &mut outer);
        assert_eq!([offset][..], file.floats(&tensor("nested.offset")), "{name}: mean");
        assert_eq!(outer, file.floats(&tensor("nested.absmax2")), "{name}: outer scales");
        assert_eq!(nested, file.bytes(&tensor("nested.absmax_u8")), "{name}: nested codes");
        let format = BlockFormat { double_quant: true, ..format };
        let bytes = [(RunMeaning::Codes, &codes[..]), (RunMeaning::ScaleCodes, &nested)];
        let runs = RunsView::new(bytes, [(RunMeaning::NestedScales, &outer[..])], offset);
        let scales: Vec<f32> = (0..absmax.len()).map(quant::block_scales(&runs, true)).collect();
        assert_eq!(scales, file.floats(&tensor("nested.absmax_dequant")), "{name}: scales");
        format.dequantize(&runs, 0, &mut values);
        if file.has(&tensor("nested.dequant")) {
            assert_eq!(rounded(values, dtype), file.floats(&tensor("nested.dequant")), "{name}: values");
        }
    }
}

#[test]
fn nf4_is_bitsandbytes() {
    four_bits(&golden(), FourBit::Nf4, 14);
}

#[test]
fn fp4_is_bitsandbytes() {
    four_bits(&golden(), FourBit::Fp4, 5);
}

/// If the shared files are missing, `cargo test` prints the skipped check, although it passes.
#[test]
fn a_check_that_is_left_out_says_so() {
    let mut tests = std::process::Command::new(std::env::current_exe().unwrap());
    tests
        .arg("all_fixtures_are_met")
        .env("FINETUNE_SHARED", "no such folder")
        .env_remove("RUST_TEST_NOCAPTURE");
    let done = tests.output().unwrap();
    let said = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{said}");
    assert!(String::from_utf8_lossy(&done.stdout).contains("1 passed"));
    assert!(said.contains("SKIPPED all_fixtures_are_met: no such folder"), "{said}");
}

/// Uses the tensors that trim_quant.py keeps out of the repository.
#[test]
fn all_fixtures_are_met() {
    let beside = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared");
    let shared = std::env::var_os("FINETUNE_SHARED").map_or_else(beside, PathBuf::from);
    let folder = shared.join("fixtures/golden/quant");
    if !folder.exists() {
        let why = format!("{} is not there; set FINETUNE_SHARED", folder.display());
        skipped("all_fixtures_are_met", &why);
        return;
    }
    assert!(File::open_in(&folder, "nf4").has("nested3_192x256.dequant"), "the whole set");
    four_bits(&folder, FourBit::Nf4, 14);
    four_bits(&folder, FourBit::Fp4, 5);
}

/// Returns i / 2^20 from -1 to 1.
fn dyadic() -> Vec<f32> {
    (-(1 << 20)..=1 << 20).map(|i| i as f32 / (1 << 20) as f32).collect()
}

/// Returns the codes of all [`dyadic`] numbers, which are ascending, from their counts.
fn dyadic_codes(file: &File, kind: &str) -> Vec<u8> {
    let counts = file.counts(&format!("dyadic.{kind}"));
    counts.iter().enumerate().flat_map(|(code, &count)| std::iter::repeat_n(code as u8, count)).collect()
}

/// Returns the codes, by ascending value, of `values` between -1 and 1. Each block holds a 1 at
/// another index.
fn places(kind: FourBit, block_size: usize, values: &[f32]) -> Vec<u8> {
    let mut order: Vec<u8> = (0..16).collect();
    order.sort_by(|&a, &b| kind.table()[usize::from(a)].total_cmp(&kind.table()[usize::from(b)]));
    let mut ranks = Vec::new();
    for (i, part) in values.chunks(block_size - 1).enumerate() {
        let mut block = part.to_vec();
        block.resize(block_size - 1, 0.0);
        let at = i % block_size;
        block.insert(at, 1.0);
        let (mut codes, mut absmax) = (vec![0u8; block_size / 2], [0f32]);
        plain(kind, block_size).quantize(&block, &mut codes, &mut absmax);
        let mut codes: Vec<u8> = codes.iter().flat_map(|byte| [byte >> 4, byte & 15]).collect();
        codes.remove(at);
        let rank_of = |code: &u8| order.iter().position(|other| other == code).unwrap() as u8;
        ranks.extend(codes[..part.len()].iter().map(rank_of));
    }
    ranks
}

#[test]
fn ties_of_4_bits_fall_as_bitsandbytes_has_them() {
    let file = File::open("ties");
    for kind in FourBit::ALL {
        let name = kind.name();
        assert!(places(kind, 64, &dyadic()) == dyadic_codes(&file, name), "{name}: dyadic numbers");
        let limits = file.floats(&format!("limits.{name}"));
        let below: Vec<f32> = limits.iter().map(|limit| limit.next_down()).collect();
        assert_eq!(places(kind, 64, &limits), (1..16).collect::<Vec<u8>>(), "{name}: the least of each code");
        assert_eq!(
            places(kind, 64, &below),
            (0..15).collect::<Vec<u8>>(),
            "{name}: the largest of each code"
        );

        // The reference also stores indices; the last block is not full.
        let input = file.floats(&format!("bf16.{name}.input"));
        let mut codes = vec![0u8; input.len() / 2];
        let mut absmax = vec![0f32; input.len().div_ceil(64)];
        plain(kind, 64).quantize(&input, &mut codes, &mut absmax);
        assert_eq!(absmax, file.floats(&format!("bf16.{name}.absmax")), "{name}: scales");
        let values = part(plain(kind, 64), &codes, &absmax, 0, input.len());
        let mut table = kind.table().to_vec();
        table.sort_by(f32::total_cmp);
        let wanted = file.bytes(&format!("bf16.{name}.codes")).into_iter().enumerate();
        let wanted: Vec<f32> = wanted.map(|(i, rank)| table[usize::from(rank)] * absmax[i / 64]).collect();
        assert_eq!(values, wanted, "{name}: bf16 values");
    }
}

/// Returns the 8-bit codes of `values` between -1 and 1. Each block holds a 1 at another index.
fn codes_of_8_bits(values: &[f32]) -> Vec<u8> {
    let mut all_codes = Vec::new();
    for (i, part) in values.chunks(255).enumerate() {
        let mut block = part.to_vec();
        let at = i % (part.len() + 1);
        block.insert(at, 1.0);
        let (mut codes, mut absmax) = (vec![0u8; block.len()], [0f32]);
        plain(Int8, 256).quantize(&block, &mut codes, &mut absmax);
        assert_eq!(codes.remove(at), 255);
        all_codes.extend(codes);
    }
    all_codes
}

#[test]
fn ties_of_8_bits_fall_as_bitsandbytes_has_them() {
    let file = File::open("ties");
    assert!(codes_of_8_bits(&dyadic()) == dyadic_codes(&file, "int8"), "dyadic numbers");
    // Codes nearer to zero than 1.5e-5 never occur: their limits coincide.
    let limits = file.floats("limits.int8");
    for x in limits.iter().flat_map(|limit| [limit.next_down(), *limit]) {
        let code = limits.iter().filter(|limit| **limit <= x).count();
        assert_eq!(codes_of_8_bits(&[x]), [code as u8], "{x:e}");
    }
    let input = file.floats("bf16.int8.input");
    let (mut codes, mut absmax) = (vec![0u8; input.len()], vec![0f32; input.len().div_ceil(256)]);
    plain(Int8, 256).quantize(&input, &mut codes, &mut absmax);
    assert_eq!(absmax, file.floats("bf16.int8.absmax"));
    assert_eq!(codes, file.bytes("bf16.int8.codes"));
    for case in ["uniform_192_415", "uniform_192_361", "uniform_64_31", "normal_192_194", "normal_8000_0"] {
        let tensor = |end: &str| format!("nested.{case}.{end}");
        let scales = file.floats(&tensor("scales"));
        let (mut codes, mut outer) = (vec![0; scales.len()], vec![0.0; scales.len().div_ceil(NESTED_BLOCK)]);
        let offset = quant::nest(&scales, &mut codes, &mut outer);
        assert_eq!([offset][..], file.floats(&tensor("offset")), "{case}: mean");
        assert_eq!(outer, file.floats(&tensor("absmax")), "{case}: outer scales");
        assert_eq!(codes, file.bytes(&tensor("codes")), "{case}: codes");
    }
}

/// Optimizer states use the nearest code, and the even one halfway between two, as bitsandbytes'
/// CUDA kernels do; no such reference exists for a CPU.
#[test]
fn ties_of_8_bit_moments_fall_on_even_codes() {
    for map in [quant::DynamicMap::signed(), quant::DynamicMap::unsigned()] {
        let values = map.values();
        let midpoint = |code: usize| (values[code] + values[code + 1]) / 2.0;
        for code in 0..255 {
            let tie = midpoint(code);
            let mut codes = [0u8; 4];
            map.quantize(&[1.0, tie.next_down(), tie, tie.next_up()], &mut codes);
            let even = code + code % 2;
            assert_eq!(codes.map(usize::from), [255, code, even, code + 1], "{tie:e}");
        }
        let mut codes = [1u8; 3];
        map.quantize(&[0.0, 1.0, -0.0], &mut codes);
        assert_eq!(codes.map(|code| values[usize::from(code)]), [0.0, 1.0, 0.0], "zero stays zero");
        let all: Vec<f32> = dyadic().into_iter().filter(|x| *x >= values[0].min(0.0)).collect();
        let mut code = 0;
        for block in all.chunks(255) {
            let mut codes = vec![0u8; block.len() + 1];
            map.quantize(&[block, &[1.0]].concat(), &mut codes);
            for (x, actual) in block.iter().zip(codes) {
                while code < 255 && (*x > midpoint(code) || *x == midpoint(code) && code % 2 == 1) {
                    code += 1;
                }
                assert_eq!(usize::from(actual), code, "{x:e}");
            }
        }
    }
}

#[test]
fn blockwise_int8_is_bitsandbytes() {
    let file = File::open("int8");
    for (name, case) in cases("int8") {
        let tensor = |end: &str| format!("{name}.{end}");
        let (input, absmax) = (file.floats(&tensor("input")), file.floats(&tensor("absmax")));
        let block_size = case["blocksize"].as_u64().unwrap() as usize;
        let mut codes = vec![0u8; input.len()];
        if case["signed"] == true {
            let mut actual = vec![0f32; absmax.len()];
            plain(Int8, block_size).quantize(&input, &mut codes, &mut actual);
            assert_eq!(actual, absmax, "{name}: scales");
            assert_eq!(codes, file.bytes(&tensor("codes")), "{name}: codes");
            let values = part(plain(Int8, block_size), &codes, &absmax, 0, input.len());
            assert_eq!(values, file.floats(&tensor("dequant")), "{name}: values");
        } else {
            for (i, (code, value)) in codes.iter_mut().zip(&input).enumerate() {
                *code = quant::nearest(quant::dynamic_unsigned(), value / absmax[i / block_size]);
            }
            // Codes of moments, which differ from the library's CPU code.
            assert_eq!(codes, file.bytes(&tensor("codes_nearest")), "{name}: codes");
        }
    }
}

#[test]
fn rows_of_llm_int8_are_bitsandbytes() {
    let file = File::open("int8");
    let input = file.floats("vectorwise.input_f16");
    let shape = file.0.info("vectorwise.input_f16").unwrap().shape.clone();
    let (mut codes, mut absmax) = (vec![0u8; input.len()], vec![0f32; shape[0]]);
    plain(Int8Rows, shape[1]).quantize(&input, &mut codes, &mut absmax);
    assert_eq!(absmax, file.floats("vectorwise.absmax"));
    assert_eq!(codes, file.bytes("vectorwise.rows_i8"));
}

/// Checks `len` values from `from` on of `n` quantized ones.
fn part_of_the_whole<C: BlockCodes>(format: BlockFormat<C>, seed: u32, n: usize, from: usize, len: usize) {
    let value = |i: usize| ((i as f32 + seed as f32 * 1e-4) * 12.9898).sin() * 0.1;
    let input: Vec<f32> = (0..n).map(value).collect();
    let (mut codes, mut absmax) = (vec![0u8; format.code_bytes(n)], vec![0f32; format.blocks(n)]);
    format.quantize(&input, &mut codes, &mut absmax);
    let code = |i: usize| match C::BITS {
        4 if i.is_multiple_of(2) => codes[i / 2] >> 4,
        4 => codes[i / 2] & 15,
        _ => codes[i],
    };
    let table = format.codes.table();
    let whole: Vec<f32> =
        (0..n).map(|i| table[usize::from(code(i))] * absmax[i / format.block_size]).collect();
    let from = from.min(n);
    let part = part(format, &codes, &absmax, from, len.min(n - from));
    assert_eq!(&part[..], &whole[from..from + part.len()], "{format:?}");
}

proptest! {
    /// Checks that any part of any tensor equals that part of the whole to the bit, and that the
    /// whole follows the definition.
    #[test]
    fn parts_are_parts_of_the_whole(
        seed in any::<u32>(), n in 1usize..700, block_size in 1usize..130, from in 0usize..700, len in 0usize..700,
    ) {
        for codes in FourBit::ALL {
            part_of_the_whole(plain(codes, block_size), seed, n, from, len);
        }
        part_of_the_whole(plain(Int8, block_size), seed, n, from, len);
    }
}

/// bitsandbytes' own rule for its kernels: fewer than 20 parameters differ by more than 1e-5 + 1e-3
/// relative. Its CPU code uses a neighbour of the nearest code for up to 2 % of the values.
#[test]
fn adamw_in_8_bits_follows_bitsandbytes() {
    use candle_core::{Device, Tensor};
    use finetune::optim::{AdamW, Optimizer, OptimizerOptions, ParamGroup, StateValues};

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
        value: None,
        rounding: StochasticRounding::new(RngStream::new(0), 0),
        param: param.clone().into(),
        grad: param.zeros_like().unwrap(),
        decay: true,
        rate: 1.0,
        large: true,
    };
    let betas = [case["betas"][0].as_f64().unwrap(), case["betas"][1].as_f64().unwrap()];
    let options = OptimizerOptions {
        algorithm: std::sync::Arc::new(AdamW { betas, eps: number("eps") }),
        weight_decay: number("weight_decay"),
        state: StateDtype::Int8,
    };
    let mut optimizer = Optimizer::new(options, vec![piece.clone()]).unwrap();
    let steps = case["steps"].as_u64().unwrap();
    for step in 1..=steps {
        piece.grad.slice_set(&tensor(&format!("grad{step}")), 0, 0).unwrap();
        optimizer.update(number("lr"), 1.0).unwrap();
    }
    // The reference stores no copies: every step's tensors hold the last step's values.
    let wanted = file.floats(&format!("param{steps}"));
    let ours = param.to_vec1::<f32>().unwrap();
    let off = |(ours, theirs): &(&f32, &f32)| (*ours - *theirs).abs() > 1e-5 + 1e-3 * theirs.abs();
    let missed = ours.iter().zip(&wanted).filter(off).count();
    assert!(missed < 20, "{missed} of {} parameters", wanted.len());
    let largest = ours.iter().zip(&wanted).fold(0f32, |max, (ours, theirs)| max.max((ours - theirs).abs()));
    // A code beside the nearest one changes an update by a few percent of the learning rate.
    assert!(largest < 1e-4, "{largest}");
    for (i, moment) in optimizer.states()[0].iter().enumerate() {
        let StateValues::Int8(moment) = moment else { panic!("32 bits") };
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

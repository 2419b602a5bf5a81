//! `finetune plan` for runs that multiply by frozen weights in bf16 or fp8.

use serde_json::Value;

use crate::plan::sizing::{OWN, plan, shapes};
use crate::test_dir::{TestDir, golden};

/// Runs a plan that must be refused, and returns its error.
fn refused(dir: &TestDir, more: &[&str]) -> String {
    let args = [&["plan", "--quiet", "--model", "7B"], more].concat();
    let output = dir.command(&args).output().unwrap();
    assert_eq!((output.status.code(), output.stdout.len()), (Some(1), 0), "{more:?}");
    dir.told(&output.stderr)
}

/// A copy takes two bytes for each quantized weight, and no product dequantizes any.
#[test]
fn a_bf16_copy_of_quantized_weights_is_planned() {
    let dir = shapes();
    let qlora = ["--recipe", "qlora", "--on", "H100-80GB", "--set", "train.recompute=none"];
    let copy = ["--set", "quantization.bf16_copy=true"];
    let [without, with] = [&[][..], &copy].map(|more| plan(&dir, "7B", &[&qlora, more].concat()));
    let bytes = |said: &Value, cause: &str| {
        let causes = said["memory"].as_array().unwrap();
        causes.iter().find(|term| term["cause"] == cause).unwrap()["bytes"].as_u64().unwrap()
    };
    let quantized = 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008);
    assert_eq!(bytes(&with, "weights"), bytes(&without, "weights") + 2 * quantized);
    assert!(bytes(&with, "workspace") <= bytes(&without, "workspace"));
    let secs = |said: &Value, what: &str| said["time"][what].as_f64().unwrap();
    // Two passes read half a byte a weight, and write two, at 0.8 of 3.35 TB/s.
    let of_each = 2.5 * quantized as f64 / (0.8 * 3.35e12);
    let turns = without["micro_batches"].as_f64().unwrap();
    let by_hand = 2.0 * turns * of_each;
    assert!((secs(&without, "dequantize") / by_hand - 1.0).abs() < 1e-6, "{by_hand}");
    assert_eq!(secs(&with, "dequantize"), 0.0);
    assert!(secs(&with, "total") < secs(&without, "total"));
    assert!(secs(&with, "forward") < secs(&without, "forward"));
}

/// A plan refuses what the run refuses.
#[test]
fn a_bf16_copy_that_nothing_reads_is_refused() {
    let dir = shapes();
    let copy = ["--recipe", "qlora", "--set", "quantization.bf16_copy=true"];
    for (more, cause) in [
        (&["--on", "8xH100-80GB", "--set", "parallel.strategy=fsdp"][..], "`parallel.strategy`"),
        (&["--on", "cpu-512GB"], "the CPU multiplies with the codes as they are"),
    ] {
        let error = refused(&dir, &[&copy[..], more].concat());
        assert!(error.contains("`quantization.bf16_copy`") && error.contains(cause), "{error}");
    }
}

/// A base in GPTQ keeps codes, scales, zeros and the group of each column on a GPU. Its products
/// dequantize two panels at a time at most.
#[test]
fn a_base_that_stays_packed_is_planned_on_a_gpu() {
    let dir = shapes();
    let model = golden("qbases/models/tiny-gptq-4-g32-act").display().to_string();
    let planned = |dequantize: &str| {
        let key = format!("model.dequantize={dequantize}");
        plan(&dir, &model, &["--recipe", "lora", "--on", "H100-80GB", "--set", &key])
    };
    let bytes = |said: &Value, cause: &str| {
        let causes = said["memory"].as_array().unwrap();
        causes.iter().find(|term| term["cause"] == cause).unwrap()["bytes"].as_u64().unwrap()
    };
    let (plain, packed) = (planned("true"), planned("false"));
    // Of both blocks q and o of 64x64, k and v of 32x64, gate and up of 96x64, down of 64x96.
    let unquantized = [(2, 64, 64), (2, 32, 64), (2, 96, 64), (1, 64, 96)].map(|(count, rows, columns)| {
        let cells = rows * columns / 32;
        count * (rows * columns / 2 + 3 * cells + 2 * columns)
    });
    let values = 2 * 64 * 64 + 2 * 32 * 64 + 3 * 96 * 64;
    let saved = 2 * (2 * values - unquantized.iter().sum::<u64>());
    assert_eq!(bytes(&plain, "weights"), bytes(&packed, "weights") + saved);
    assert!(bytes(&plain, "workspace") <= bytes(&packed, "workspace"));
    let secs = |said: &Value| said["time"]["dequantize"].as_f64().unwrap();
    assert!(secs(&plain) == 0.0 && secs(&packed) > 0.0);
}

/// Compute capability 8.9 is the first with products in fp8.
#[test]
fn products_in_fp8_need_a_card_that_has_them() {
    let dir = shapes();
    let fp8 = ["--recipe", "lora", "--set", "train.base_products=fp8", "--on"];
    assert_eq!(
        refused(&dir, &[&fp8[..], &["8xA100-80GB"]].concat()),
        "error: cannot multiply the frozen weights in fp8 (`train.base_products`) on A100-80GB\n  caused by: the \
         A100-80GB has compute capability 8.0; fp8 needs 8.9\nhint: remove `base_products`: products are then in \
         bf16\n"
    );
    let own = |capability: &str| {
        dir.write("own.toml", &(OWN.replace("NAME", "own") + capability));
        [&fp8[..], &["own.toml"]].concat()
    };
    let why = "the own has compute capability 8.6";
    assert!(refused(&dir, &own("compute_capability = 8.6\n")).contains(why));
    // The number of a compiler's target is not a capability.
    for number in ["80", "890"] {
        let error = refused(&dir, &own(&format!("compute_capability = {number}\n")));
        assert!(error.contains(&format!("`compute_capability` is {number}.0")), "{error}");
    }
    for on in [[&fp8[..], &["4090"]].concat(), own("compute_capability = 12.0\n"), own("")] {
        assert_eq!(plan(&dir, "1B", &on)["dtype"], "bf16");
    }
    // Without bf16 the run's dtype is the first obstacle, not the card's capability.
    let error = refused(&dir, &[&fp8[..], &["8xV100-32GB"]].concat());
    assert!(error.contains("the run computes in f32; accepted beside fp8: bf16"), "{error}");
    assert!(!error.contains("products are then in bf16"), "{error}");
    let in_f32 = [&fp8[..], &["H100-80GB", "--set", "model.dtype=f32"]].concat();
    assert!(refused(&dir, &in_f32).contains("the run computes in f32; accepted beside fp8: bf16"));
}

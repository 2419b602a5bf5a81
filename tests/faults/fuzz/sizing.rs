//! Files and prices of `finetune plan`, and its page: accepted values give finite figures, and
//! shown text stays text.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use finetune::model::ModelConfig;
use finetune::planning::sizing::explorer;
use finetune::planning::sizing::hardware::Hardware;
use finetune::planning::sizing::price::Price;
use finetune::planning::sizing::rates::{Calibration, ComputeRates};
use finetune::planning::sizing::splits::{SplitWork, splits};
use finetune::planning::sizing::{MemoryTerm, Sizing};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use super::targets::{folder_of, on_file};
use super::{Target, seeds};

/// Checks that rates give finite times: neither 0 nor infinite.
fn assert_rates(rates: &ComputeRates) {
    let ComputeRates { linear, attention, elementwise, update, update_int8, copy, peak, .. } = *rates;
    for rate in [linear, attention, elementwise.unwrap_or(1.0), update, update_int8, copy, peak] {
        assert!(rate.is_normal() && rate > 0.0, "{rates:?}");
    }
}

#[test]
fn hardware_files() {
    let file = |none: &str| {
        let text = format!(
            "[device]\nname = \"own\"\naliases = [\"mine\"]\nmemory_gb = 24\nbf16_tflops = 100.5\nf32_tflops = 50\n\
             memory_gbps = 900\nprocessor = false\nlink = \"PCIe\"\nlink_gbps = {none}\nhost_gbps = 20\n\
             network_gbps = {none}\nhost_memory_gb = 64\ndisk_gbps = 3e0\ndevices_per_host = 2\nefficiency = 0.4\n\
             source = \"a bench\"\n"
        );
        text.into_bytes()
    };
    let text = String::from_utf8(seeds::of_models("config.json").swap_remove(0)).unwrap();
    let config = ModelConfig::from_json(&text, "config.json").unwrap();
    on_file("own.toml", vec![file("10"), file("0")], 1500, &[], |path| {
        for on in ["own.toml", "2xown.toml", "own.toml*2", "4xown.toml*4"] {
            let Ok(hardware) = Hardware::parse(on, folder_of(path)) else { continue };
            let rates = ComputeRates::of_sheet(&hardware.device, hardware.device.bf16_tflops > 0.0);
            assert_rates(&rates);
            let parameters = 1e11;
            let work = SplitWork {
                config: &config,
                values: 2.0 * parameters,
                gradients: 4.0 * parameters,
                states: 12.0 * parameters,
                token_secs: 6.0 * parameters / rates.linear,
                attention_secs: parameters / rates.attention,
                dequantize_secs: parameters / rates.update,
                launch_secs: 1e-3,
                update_secs: 30.0 * parameters / rates.update,
                row: 8192.0,
                tokens: 64.0 * 8192.0,
                activation_bytes: 1e6,
                carried_bytes: 0.0,
                budget: u64::MAX,
            };
            for split in splits(&work, &hardware).0 {
                assert!(split.step_secs.is_normal(), "{hardware:?}: {split:?}");
            }
        }
    });
}

#[test]
fn prices() {
    let seeds = ["32.77/h*8", "$0.14/GB-month*1200", "1e-3/h", "0/GB-month"];
    let parse = |bytes: &[u8]| {
        if let Ok(price) = Price::parse(&String::from_utf8_lossy(bytes)) {
            assert!(price.of(1e30, u64::MAX).is_finite(), "{price:?}");
        }
    };
    let seeds = seeds.iter().map(|price| price.as_bytes().to_vec()).collect();
    Target { name: "price", seeds, tries: 5000, parse: &parse }.run();
}

#[test]
fn calibrations() {
    let op = |op: &str, key: &str, value: f64| json!({"op": op, "shape": "4096 x 4096, trained", key: value});
    let ops = [
        op("matmul", "tflops", 0.1),
        op("linear_cross_entropy", "tflops", 0.125),
        op("attention", "tflops", 0.2),
        op("attention_backward", "tflops", 3.0),
        op("glu", "gbps", 10.0),
        op("adamw", "gbps", 10.5),
        op("adamw_int8", "gbps", 0.5),
    ];
    let file = json!({"device": "a processor", "processor": true, "tokens": 48, "dtype": "f32", "copy_gbps": 20.5,
        "gemm_tflops": 0.25, "ops": ops});
    on_file("speeds.json", vec![file.to_string().into_bytes()], 3000, &[], |path| {
        if let Ok(calibration) = Calibration::read(path) {
            assert_rates(&calibration.rates);
            assert!(!calibration.source().chars().any(char::is_control));
        }
    });
}

/// A plan in which every text from a user or a file is `text`.
fn sizing(text: &str) -> Sizing {
    let mut hardware = Hardware::parse("8x4090", std::path::Path::new(".")).unwrap();
    let device = &mut hardware.device;
    (device.name, device.link, device.source) = (text.to_owned(), text.to_owned(), text.to_owned());
    device.aliases = vec![text.to_owned()];
    Sizing {
        model: text.to_owned(),
        parameters: 1,
        active_parameters: 1,
        trainable: 1,
        method: text.to_owned(),
        dtype: "bf16",
        hardware: Some(hardware),
        ranks: 8,
        strategy: text.to_owned(),
        why: Some(text.to_owned()),
        recompute: "none".to_owned(),
        micro_batch_tokens: 1,
        micro_batches: 1,
        bytes: 1,
        budget: None,
        host_bytes: 0,
        host_budget: None,
        fits: None,
        memory: vec![MemoryTerm { cause: "weights", bytes: 1, formula: text.to_owned() }],
        activations: Vec::new(),
        conventions: Vec::new(),
        bytes_per_parameter: 18.0,
        speeds: Some(text.to_owned()),
        time: None,
        run: None,
        cost: None,
        leaves: Vec::new(),
        better: Vec::new(),
        splits: Vec::new(),
        refused: Vec::new(),
    }
}

/// Whatever the names are, the page has one script, whose data is JSON without a character that
/// ends it, and a policy that allows only this script.
#[test]
fn data_of_a_page() {
    let seeds = [
        "own<img src=x onerror=\"alert(1)\">",
        "</script><script>alert(1)</script>",
        "<!--<script>]]>--!>",
        "/*DATA*/null<!--POLICY-->",
        "\u{2028}\u{2029}\\u003c\\\"&lt;\r\n\u{0}",
        "a ${1} `b` 'c'",
    ];
    let parse = |bytes: &[u8]| {
        let text = String::from_utf8_lossy(bytes);
        let page = explorer::page(&sizing(&text)).unwrap();
        let (head, rest) = page.split_once("<script>").unwrap();
        let (script, foot) = rest.split_once("</script>").unwrap();
        assert!(!foot.contains("script") && foot.len() < 100, "{foot}");
        let data = script.split_once("const data = ").unwrap().1.split_once(";\nconst $ =").unwrap().0;
        assert!(!data.contains(['<', '\n', '\r', '\0']));
        let data: Value = serde_json::from_str(data).unwrap();
        assert_eq!(data["plan"]["model"], *text);
        assert_eq!(data["devices"].as_array().unwrap().last().unwrap()["name"], *text);
        let digest = STANDARD.encode(Sha256::digest(script));
        assert!(head.contains(&format!("script-src 'sha256-{digest}'")), "the policy is of another script");
    };
    let seeds = seeds.iter().map(|text| text.as_bytes().to_vec()).collect();
    Target { name: "page", seeds, tries: 500, parse: &parse }.run();
}

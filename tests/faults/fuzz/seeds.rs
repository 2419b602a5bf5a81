//! The real files from which the broken ones are made.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_array::{ArrayRef, NullArray, RecordBatch};
use arrow_ipc::writer::StreamWriter;
use candle_core::quantized::GgmlDType;
use candle_core::quantized::gguf_file::Content;
use finetune::export::gguf::{self, GgufType};
use finetune::model::ModelConfig;
use finetune::weights::ModelFiles;
use flate2::write::GzEncoder;
use parquet::data_type::{ByteArray, ByteArrayType, Int64Type};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use safetensors::tensor::{Dtype, TensorView};

use crate::gguf_contents::Contents;

pub(crate) fn golden(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(path)
}

/// Returns the files of this name of every golden model.
pub(crate) fn of_models(name: &str) -> Vec<Vec<u8>> {
    of_folders("models", name)
}

/// Returns the files of this name of all folders below `set`.
pub(crate) fn of_folders(set: &str, name: &str) -> Vec<Vec<u8>> {
    let mut folders: Vec<PathBuf> =
        std::fs::read_dir(golden(set)).unwrap().map(|entry| entry.unwrap().path()).collect();
    folders.sort();
    let files: Vec<Vec<u8>> =
        folders.iter().filter_map(|folder| std::fs::read(folder.join(name)).ok()).collect();
    assert!(!files.is_empty(), "{name}");
    files
}

/// More bytes than the tensors of any of [`gguf_headers`].
pub(crate) const GGUF_TENSORS: usize = 1 << 20;

/// Returns the headers of GGUF files of some golden models.
pub(crate) fn gguf_headers() -> Vec<Vec<u8>> {
    type Change = fn(&mut Contents, usize);
    let none: Change = |_, _| ();
    let names = ["apertus", "deepseek-v3", "gemma4-e2b", "gpt-oss", "lfm2", "lfm2-moe", "llama4", "qwen3-5"];
    let mut seeds = names.map(|name| (name, none)).to_vec();
    // As llama.cpp's converter writes them: blocks that predict further tokens, joined experts, of
    // which the second layer is in f16.
    seeds.push(("qwen3-5", |contents, layers| contents.predict_further("qwen35", layers as u32, 1)));
    seeds.push(("gemma4-moe", |contents, layers| {
        contents.join_experts(0..1, GgmlDType::F32);
        contents.join_experts(1..layers, GgmlDType::F16);
    }));
    let header = |(name, change): (&str, Change)| {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("model");
        std::fs::create_dir(&folder).unwrap();
        for entry in std::fs::read_dir(golden("families/models").join(format!("tiny-{name}"))).unwrap() {
            let entry = entry.unwrap();
            std::fs::copy(entry.path(), folder.join(entry.file_name())).unwrap();
        }
        let text = with_numbers_of_llama_cpp(name, &std::fs::read(folder.join("config.json")).unwrap());
        std::fs::write(folder.join("config.json"), &text).unwrap();
        let mut config = ModelConfig::from_json(&text, "config.json").unwrap();
        let mut files = ModelFiles::open(&folder).unwrap();
        finetune::model::settle(&mut config, &mut files).unwrap();
        let path = dir.path().join("model.gguf");
        gguf::write_model(&config, &files, name, GgufType::F32, &path).unwrap();
        let mut contents = Contents::of(&path);
        change(&mut contents, config.num_layers());
        contents.write(&path);
        gguf::describe_base(&path, &dir.path().join("described")).unwrap();
        let mut bytes = std::fs::read(&path).unwrap();
        let content = Content::read(&mut std::io::Cursor::new(&bytes)).unwrap();
        let data = usize::try_from(content.tensor_data_offset).unwrap();
        assert!(bytes.len() - data < GGUF_TENSORS, "{name}");
        bytes.truncate(data);
        bytes
    };
    seeds.into_iter().map(header).collect()
}

/// Returns a config.json with the numbers that llama.cpp always has in this architecture.
fn with_numbers_of_llama_cpp(name: &str, config: &[u8]) -> String {
    let mut config: serde_json::Value = serde_json::from_slice(config).unwrap();
    match name {
        "lfm2-moe" => config["routed_scaling_factor"] = 1.0.into(),
        "llama4" => {
            config["attn_scale"] = 0.1.into();
            config["attention_chunk_size"] = 8192.into();
            config["floor_scale"] = 8192.into();
        }
        _ => {}
    }
    config.to_string()
}

/// Returns the first lines of every golden data file.
pub(crate) fn rows() -> Vec<Vec<u8>> {
    ["alpaca", "preference", "prompt_completion", "sft_messages", "sharegpt", "text"]
        .iter()
        .map(|name| {
            let text = std::fs::read_to_string(golden(&format!("data/{name}.jsonl"))).unwrap();
            text.lines().take(3).collect::<Vec<_>>().join("\n").into_bytes()
        })
        .collect()
}

/// Returns a weights file with the tensors of one module.
pub(crate) fn of_one_layer(file: &[u8]) -> Vec<u8> {
    let tensors = safetensors::SafeTensors::deserialize(file).unwrap();
    let selected = tensors.tensors().into_iter().filter(|(name, _)| name.contains("0.self_attn.k_proj"));
    safetensors::serialize(selected, None).unwrap()
}

pub(crate) fn safetensors() -> Vec<u8> {
    let (a, b) = ([0; 48], [0; 16]);
    let views = [
        ("model.embed_tokens.weight", TensorView::new(Dtype::F32, vec![4, 3], &a).unwrap()),
        ("model.norm.weight", TensorView::new(Dtype::BF16, vec![8], &b).unwrap()),
    ];
    let about = [("format".to_owned(), "pt".to_owned())].into_iter().collect();
    safetensors::serialize(views, Some(about)).unwrap()
}

/// Tables of texts, of numbers and of lists with a hundred rows each, and small ones in other
/// codecs.
pub(crate) fn parquet() -> Vec<Vec<u8>> {
    let properties = [
        WriterProperties::builder().build(),
        WriterProperties::builder()
            .set_dictionary_enabled(false)
            .set_compression(parquet::basic::Compression::SNAPPY)
            .build(),
    ];
    let packed = ["gzip", "brotli", "lz4"].map(|codec| golden(&format!("data/packed_{codec}.parquet")));
    let written = properties.into_iter().map(|properties| write_parquet(properties, 100));
    written.chain(packed.iter().map(|path| std::fs::read(path).unwrap())).collect()
}

fn write_parquet(properties: WriterProperties, rows: usize) -> Vec<u8> {
    let schema = "message rows { REQUIRED BYTE_ARRAY text (UTF8); OPTIONAL INT64 number;
                  OPTIONAL group tags (LIST) { REPEATED group list { OPTIONAL BYTE_ARRAY element (UTF8); } } }";
    let schema = Arc::new(parse_message_type(schema).unwrap());
    let mut out = Vec::new();
    let mut writer = SerializedFileWriter::new(&mut out, schema, Arc::new(properties)).unwrap();
    let mut group = writer.next_row_group().unwrap();
    let text = |row: usize| ByteArray::from(format!("the text of row {}", row % 7).into_bytes());

    let mut column = group.next_column().unwrap().unwrap();
    let texts: Vec<ByteArray> = (0..rows).map(text).collect();
    column.typed::<ByteArrayType>().write_batch(&texts, None, None).unwrap();
    column.close().unwrap();

    let mut column = group.next_column().unwrap().unwrap();
    let there: Vec<i16> = (0..rows).map(|row| i16::from(row % 3 != 0)).collect();
    let numbers: Vec<i64> = (0..rows).filter(|row| row % 3 != 0).map(|row| row as i64).collect();
    column.typed::<Int64Type>().write_batch(&numbers, Some(&there), None).unwrap();
    column.close().unwrap();

    let mut column = group.next_column().unwrap().unwrap();
    let (levels, repeats) = (vec![3_i16; 2 * rows], [0_i16, 1].repeat(rows));
    let tags: Vec<ByteArray> = (0..2 * rows).map(text).collect();
    column.typed::<ByteArrayType>().write_batch(&tags, Some(&levels), Some(&repeats)).unwrap();
    column.close().unwrap();

    group.close().unwrap();
    writer.close().unwrap();
    out
}

/// Arrow files and streams of all types, compressed and not (tests/golden/scripts/make_tables.py).
pub(crate) fn arrow() -> Vec<Vec<u8>> {
    let names = [
        "rows.arrow",
        "stream.arrow",
        "lz4.feather",
        "zstd.feather",
        "types.arrow",
        "tools.arrow",
        "json.arrow",
    ];
    names.iter().map(|name| std::fs::read(golden("field/tables").join(name)).unwrap()).collect()
}

/// An Arrow stream that claims this many rows of a column without bytes.
pub(crate) fn arrow_of_nulls(rows: usize) -> Vec<u8> {
    let column: ArrayRef = Arc::new(NullArray::new(rows));
    let batch = RecordBatch::try_from_iter([("text", column)]).unwrap();
    let mut writer = StreamWriter::try_new(Vec::new(), &batch.schema()).unwrap();
    writer.write(&batch).unwrap();
    writer.into_inner().unwrap()
}

/// Compresses `bytes` with gzip and with zstd.
pub(crate) fn packed(bytes: &[u8]) -> [Vec<u8>; 2] {
    let mut gzip = GzEncoder::new(Vec::new(), flate2::Compression::default());
    gzip.write_all(bytes).unwrap();
    [gzip.finish().unwrap(), zstd::encode_all(bytes, 3).unwrap()]
}

/// The rows of [`rows`] in UTF-16 with a byte order mark.
pub(crate) fn wide_rows() -> Vec<Vec<u8>> {
    let wide = |rows: &Vec<u8>| {
        let text = format!("\u{FEFF}{}", String::from_utf8_lossy(rows));
        text.encode_utf16().flat_map(u16::to_le_bytes).collect()
    };
    rows().iter().map(wide).collect()
}

/// This many null rows, in some hundred bytes.
pub(crate) fn null_rows(rows: usize) -> Vec<u8> {
    let schema = Arc::new(parse_message_type("message rows { OPTIONAL INT64 text; }").unwrap());
    let mut out = Vec::new();
    let mut writer = SerializedFileWriter::new(&mut out, schema, Arc::default()).unwrap();
    let mut group = writer.next_row_group().unwrap();
    let mut column = group.next_column().unwrap().unwrap();
    column.typed::<Int64Type>().write_batch(&[], Some(&vec![0; rows]), None).unwrap();
    column.close().unwrap();
    group.close().unwrap();
    writer.close().unwrap();
    out
}

/// A row of this many equal characters, in a file of at most a hundredth of that size.
pub(crate) fn long_row(bytes: usize, codec: parquet::basic::Compression) -> Vec<u8> {
    let schema = Arc::new(parse_message_type("message rows { REQUIRED BYTE_ARRAY text (UTF8); }").unwrap());
    let properties = WriterProperties::builder().set_dictionary_enabled(false).set_compression(codec).build();
    let mut out = Vec::new();
    let mut writer = SerializedFileWriter::new(&mut out, schema, Arc::new(properties)).unwrap();
    let mut group = writer.next_row_group().unwrap();
    let mut column = group.next_column().unwrap().unwrap();
    let text = ByteArray::from(vec![b'a'; bytes]);
    column.typed::<ByteArrayType>().write_batch(&[text], None, None).unwrap();
    column.close().unwrap();
    group.close().unwrap();
    writer.close().unwrap();
    out
}

/// Templates of the golden models, and some with features that those do not use.
pub(crate) fn templates() -> Vec<Vec<u8>> {
    let mut contents: Vec<Vec<u8>> = of_models("tokenizer_config.json")
        .iter()
        .filter_map(|config| {
            let config: serde_json::Value = serde_json::from_slice(config).unwrap();
            Some(config["chat_template"].as_str()?.as_bytes().to_vec())
        })
        .collect();
    let more = "{% macro f(x) %}{{ x|upper }}{% endmacro %}{% set ns = namespace(i=0, l=[]) %}\
                {% for m in messages %}{% set ns.i = ns.i + 1 %}{% set ns.l = ns.l + [m.content * 2] %}\
                {{ f(m.role) ~ (m|tojson(indent=2)) }}{{ m.content.split(' ')|join('-')|replace('a', 'bb') }}\
                {{ '%05d'|format(ns.i) }}{{ m.content|indent(4) }}{{ range(3)|list }}{% generation %}x{% endgeneration %}\
                {% endfor %}{{ ns.l|map('length')|sum }}{{ {'a': [1, {'b': 2}]}|dictsort }}{{ strftime_now('%Y') }}";
    contents.push(more.as_bytes().to_vec());
    contents
}

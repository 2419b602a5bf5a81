"""Writes the tables of tests/golden/field/tables with pyarrow: Arrow files and streams, Parquet,
and folders as `Dataset.save_to_disk` of Hugging Face datasets leaves them.

Usage: python make_tables.py FOLDER
"""

import datetime
import decimal
import json
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq

folder = Path(sys.argv[1])
ROWS = {"prompt": ["Hi", "Bye"], "completion": [" Ahoy.", " So long."]}


def stream(path, table):
    path.parent.mkdir(parents=True, exist_ok=True)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)


def file(path, table, **options):
    with pa.OSFile(str(path), "wb") as sink:
        with pa.ipc.new_file(sink, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
            writer.write_table(table)


def saved(path, rows):
    """Writes a folder like datasets 5.2 does, without files that finetune does not read."""
    stream(path / "data-00000-of-00001.arrow", pa.table(rows))
    state = {
        "_data_files": [{"filename": "data-00000-of-00001.arrow"}],
        "_fingerprint": "e2da7e3b887e74ed",
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    (path / "state.json").write_text(json.dumps(state, indent=2))
    features = {name: {"dtype": "string", "_type": "Value"} for name in rows}
    (path / "dataset_info.json").write_text(json.dumps({"features": features}, indent=2))


def one(path):
    """Writes a column of every type beside the two used columns, which have unusual types
    themselves."""
    moment = datetime.datetime(2024, 2, 29, 12, 30, 15, 250000)
    columns = {
        "prompt": pa.array(ROWS["prompt"]).dictionary_encode(),
        "completion": pa.array(ROWS["completion"], pa.string_view()),
        "large": pa.array(["a", None], pa.large_string()),
        "bytes": pa.array([b"\xff\x00", b"text"], pa.binary()),
        "large_bytes": pa.array([b"\xff", b"text"], pa.large_binary()),
        "bytes_view": pa.array([b"\xff", b"text"], pa.binary_view()),
        "fixed": pa.array([b"\xff\xfe", b"ab"], pa.binary(2)),
        "i8": pa.array([-1, 2], pa.int8()),
        "u64": pa.array([2**64 - 1, 0], pa.uint64()),
        "f16": pa.array([1.5, float("nan")], pa.float16()),
        "f32": pa.array([float("inf"), 0.5], pa.float32()),
        "f64": pa.array([float("nan"), float("-inf")]),
        "bool": pa.array([True, None]),
        "null": pa.nulls(2),
        "list": pa.array([[1, None], []]),
        "large_list": pa.array([["a"], None], pa.large_list(pa.string())),
        "list_view": pa.array([["a", "b"], None], pa.list_view(pa.string())),
        "vector": pa.array([[0.5, float("nan")], [1.0, 2.0]], pa.list_(pa.float32(), 2)),
        "struct": pa.array([{"a": 1, "b": None}, {"a": None, "b": {"c": "d"}}]),
        "map": pa.array([[("k", 1), ("l", None)], []], pa.map_(pa.string(), pa.int32())),
        "tags": pa.array([["x", "y"], ["x"]], pa.list_(pa.dictionary(pa.int32(), pa.string()))),
        "date": pa.array([moment.date(), None]),
        "s": pa.array([moment, None], pa.timestamp("s")),
        "ms": pa.array([moment, None], pa.timestamp("ms", "UTC")),
        "us": pa.array([moment, None], pa.timestamp("us")),
        "ns": pa.array([moment, None], pa.timestamp("ns")),
        "time": pa.array([moment.time(), None], pa.time64("us")),
        "far": pa.array([2**62, None], pa.timestamp("s")),
        "duration": pa.array([5, None], pa.duration("s")),
        "decimal": pa.array([decimal.Decimal("-1.50"), None], pa.decimal128(10, 2)),
        "runs": pa.RunEndEncodedArray.from_arrays(pa.array([2], pa.int32()), pa.array(["r"])),
    }
    file(path, pa.table(columns))


# Two tools whose schemas have different fields: a table gives each all fields of both, null where
# absent.
TOOLS = [
    [{"type": "function", "function": {"name": "f", "parameters": {
        "type": "object", "properties": {"a": {"type": "string"}}}}}],
    [{"type": "function", "function": {"name": "g", "parameters": {
        "type": "object", "properties": {"b": {"type": "string", "enum": ["x", "y"]}}}}}],
]
MESSAGES = [
    [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "", "tool_calls": [
        {"type": "function", "function": {"name": "f", "arguments": {"a": "x"}}}]}],
    [{"role": "user", "content": "Bye"}, {"role": "assistant", "content": "", "tool_calls": [
        {"type": "function", "function": {"name": "g", "arguments": {"b": "y"}}}]}],
]


def json_columns():
    """Stores values like the type `Json` of datasets."""
    text = [json.dumps(tools) for tools in TOOLS]
    tools = pa.ExtensionArray.from_storage(pa.json_(), pa.array(text))
    messages = pa.ListArray.from_arrays(
        pa.array([0, 2, 4], pa.int32()),
        pa.ExtensionArray.from_storage(
            pa.json_(), pa.array([json.dumps(message) for chat in MESSAGES for message in chat])
        ),
    )
    return pa.table({"messages": messages, "tools": tools})


folder.mkdir(parents=True, exist_ok=True)
table = pa.table(ROWS)
file(folder / "rows.arrow", table)
stream(folder / "stream.arrow", table)
feather.write_feather(table, folder / "lz4.feather", compression="lz4")
feather.write_feather(table, folder / "zstd.feather", compression="zstd")
one(folder / "types.arrow")
tools = pa.table({"messages": MESSAGES, "tools": TOOLS})
file(folder / "tools.arrow", tools)
pq.write_table(tools, folder / "tools.parquet")
file(folder / "json.arrow", json_columns())
pq.write_table(json_columns(), folder / "json.parquet")
with open(folder / "tools.jsonl", "w", encoding="utf-8") as lines:
    for messages, tool in zip(MESSAGES, TOOLS):
        lines.write(json.dumps({"messages": messages, "tools": tool}) + "\n")
needless = {"bin": [b"\xff\xfe", b"\x00"], "score": [float("nan"), float("-inf")], "vector": [[0.5, float("nan")], None]}
far = pa.array([2**60, None], pa.timestamp("us"))
pq.write_table(pa.table({**ROWS, **needless, "far": far}), folder / "needless.parquet")
pq.write_table(pa.table({**ROWS, "completion": [b"\xff", b"text"]}), folder / "needed.parquet")
file(folder / "needed.arrow", pa.table({**ROWS, "completion": [b"\xff", b"text"]}))
saved(folder / "saved", ROWS)
saved(folder / "saved_dict/train", ROWS)
saved(folder / "saved_dict/test", {"prompt": ["Who"], "completion": [" Me."]})
(folder / "saved_dict/dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))

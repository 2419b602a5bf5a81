#!/usr/bin/env python3
"""Compares trained tokens with the tagged templates of TRL: same text, same mask.

    scripts/check_chat_masks.py target/debug/finetune

TRL has copies of chat templates (`NAME_training.jinja`) in which `{% generation %}` marks what the
assistant wrote. For each template that has such a copy, the chats below go through `finetune data`
with the plain template, and through transformers with the tagged one. Where both print the same
text, the trained text must be the same. Needs Python with transformers, trl and tokenizers. The
exit status is the number of chats that differ.
"""

import importlib.util
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tokenizers import AddedToken, Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "tests/golden/models/tiny-qwen2"
# Located, not imported: the templates need no PyTorch.
TEMPLATES = Path(importlib.util.find_spec("trl").origin).parent / "chat_templates"

TOOL = {"type": "function", "function": {"name": "get_temp", "description": "Temperature", "parameters": {
    "type": "object", "properties": {"city": {"type": "string", "description": "City"}}, "required": ["city"]}}}


# This text may end a chat after the end of its last turn.
EOS = "<|im_end|>"
MARKERS = r"<\|[^|<>\s]+>|<[^|<>/\s]+\|>|<\|[^|<>\s]+\|>|<｜[^｜<>]+｜>|\[/?[A-Z_]{3,}\]|</?(?:start|end)_of_turn>|<turn\|>|<\|turn>|</s>"


def said(role, content, **more):
    return {"role": role, "content": content, **more}


def call(city, **more):
    arguments = {"city": city} | more
    return [{"type": "function", "id": "call00000", "function": {"name": "get_temp", "arguments": arguments}}]


CHATS = {
    "one turn": [said("user", "Name a river."), said("assistant", "The Elph.")],
    "two turns": [said("user", "Name a river."), said("assistant", "The Elph."), said("user", "And a town?"),
                  said("assistant", "Strelsau.")],
    "three turns": [said("user", "first"), said("assistant", "one"), said("user", "second"), said("assistant", "two"),
                    said("user", "third"), said("assistant", "three")],
    "system": [said("system", "Be brief."), said("user", "Name a river."), said("assistant", "The Elph.")],
    "lines": [said("user", "Two lines"), said("assistant", "One\n\nTwo\n"), said("user", " x "), said("assistant", " y ")],
    "like the question": [said("user", "Say Elph"), said("assistant", "Say Elph"), said("user", "Say Elph"),
                          said("assistant", "Say Elph")],
    "reasoning": [said("user", "2+2"), said("assistant", "4", reasoning_content="Sum.")],
    "reasoning of two": [said("user", "2+2"), said("assistant", "4", reasoning_content="Sum."), said("user", "3+3"),
                         said("assistant", "6", reasoning_content="Sum again.")],
    "thought in the text": [said("user", "2+2"), said("assistant", "<think>\nSum.\n</think>\n\n4"), said("user", "3+3"),
                            said("assistant", "<think>\nMore.\n</think>\n\n6")],
    "call": [said("user", "How warm is Brno?"), said("assistant", "", tool_calls=call("Brno")),
             said("tool", "7", name="get_temp", tool_call_id="call00000"), said("assistant", "7 degrees.")],
    "call at the end": [said("user", "How warm is Brno?"), said("assistant", "I look.", tool_calls=call("Brno"))],
    "call with a number": [said("user", "How warm is Brno?"), said("assistant", "", tool_calls=call("Brno", days=3)),
                           said("tool", "7", name="get_temp", tool_call_id="call00000"), said("assistant", "7 degrees.")],
    "call with a list": [said("user", "How warm is it?"), said("assistant", "", tool_calls=call(["Brno"], exact=True))],
    "call of many kinds": [said("user", "How warm is it?"),
                           said("assistant", "", tool_calls=call("Brno", days=None, at={"lat": 49.2, "of": "Brno"}))],
}


def model_for(folder, texts):
    """Writes the golden tokenizer with the markers of a template as special tokens."""
    markers = set()
    for text in texts:
        markers.update(re.findall(MARKERS, text))
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(m, special=True, normalized=False) for m in sorted(markers)])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((MODEL / "config.json").read_text())
    config["vocab_size"] = 4096
    (folder / "config.json").write_text(json.dumps(config))


def write_eos(folder, eos):
    """Sets the token that ends the chats of a template."""
    config = json.loads((MODEL / "tokenizer_config.json").read_text()) | {"eos_token": eos}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def trained_text(output):
    """Returns the text of a row, with ⟦ and ⟧ around trained text, from the table of `finetune
    data`."""
    text, open_ = "", False
    for line in output.splitlines():
        found = re.match(r"\s+(\d+)\s+(\d+) {2}(train|     ) {2}.*? {2}(\".*\")$", line)
        if not found:
            continue
        trained = found[3] == "train"
        if trained != open_:
            text += "⟦" if trained else "⟧"
            open_ = trained
        text += json.loads(re.sub(r"\\u\{([0-9a-f]+)\}", lambda m: f"\\u{int(m[1], 16):04x}", found[4]).replace("\\'", "'"))
    return text + ("⟧" if open_ else "")


def expected_text(template, chat, tools, tokens):
    texts, spans = render_jinja_template([chat], tools=tools, chat_template=template, return_assistant_tokens_mask=True,
                                         **tokens)
    text, out, at = texts[0], "", 0
    for start, end in spans[0]:
        out += text[at:start] + ("⟦" + text[start:end] + "⟧" if end > start else "")
        at = end
    return text, (out + text[at:]).replace("⟧⟦", "")


def covers(wide, narrow, text):
    """Returns true if each trained part of `narrow` is one of `wide`, without the header before it
    or the newline after it."""
    def parts(text):
        found, at = [], 0
        for piece in re.split("([⟦⟧])", text):
            if piece == "⟦":
                found.append([at, None])
            elif piece == "⟧":
                found[-1][1] = at
            else:
                at += len(piece)
        return found
    wide, narrow = parts(wide), parts(narrow)
    return len(wide) == len(narrow) and all(
        a[0] <= b[0] <= b[1] <= a[1] and text[b[1]:a[1]].strip() in ("", EOS) for a, b in zip(wide, narrow))


def main():
    binary = Path(sys.argv[1]).resolve()
    counts = dict.fromkeys(["same", "differ", "header, newline or EOS trained by the tags", "call that the template does not print",
                            "text that the template reads as parts", "other text", "refused by the template"], 0)
    config = json.loads((MODEL / "tokenizer_config.json").read_text())
    tokens = {key: value for key, value in config.items() if key.endswith("_token") and isinstance(value, str)}
    tokens["eos_token"] = EOS
    with tempfile.TemporaryDirectory() as scratch:
        scratch = Path(scratch)
        for tagged in sorted(TEMPLATES.glob("*_training.jinja")):
            plain = tagged.with_name(tagged.name.replace("_training", ""))
            if not plain.exists():
                continue
            folder = scratch / plain.stem
            model_for(folder, [plain.read_text(), tagged.read_text()])
            (scratch / "plain.jinja").write_bytes(plain.read_bytes())
            for name, chat in CHATS.items():
                tools = [TOOL] if "call" in name else None
                try:
                    before, _ = expected_text(plain.read_text(), chat, tools, tokens)
                    text, expected = expected_text(tagged.read_text(), chat, tools, tokens)
                except Exception as error:
                    counts["refused by the template"] += 1
                    continue
                if before != text:
                    counts["other text"] += 1
                    expected = None
                last = re.findall(MARKERS, before)
                write_eos(folder, last[-1] if last and before.rstrip().endswith(last[-1]) else "<|im_end|>")
                row = {"messages": chat} | ({"tools": tools} if tools else {})
                (scratch / "rows.jsonl").write_text(json.dumps(row) + "\n")
                done = subprocess.run([binary, "data", "--tokens", "--model", folder, "--dataset", scratch / "rows.jsonl", "--set",
                                       f"data.chat_template={scratch / 'plain.jinja'}", "--set", "data.max_seq_len=4000"],
                                      capture_output=True, text=True)
                found = trained_text(done.stdout)
                if expected is None:
                    if done.returncode or found.replace("⟦", "").replace("⟧", "")[:len(before.rstrip())] != before.rstrip():
                        print(f"{plain.stem}, {name}: REFUSED OR OTHER TEXT\n  {done.stderr[-600:]}\n  {before!r}\n  {found!r}")
                    continue
                same = found == expected
                plain_found = found.replace("⟦", "").replace("⟧", "")
                said_texts = [message["content"].strip() for message in chat]
                if not same and plain_found == text and covers(expected, found, text):
                    counts["header, newline or EOS trained by the tags"] += 1
                    continue
                if "comes out empty" in done.stderr and "tool_calls" in json.dumps(chat):
                    counts["call that the template does not print"] += 1
                    continue
                if not all(said in text for said in said_texts) and all(said in plain_found for said in said_texts):
                    counts["text that the template reads as parts"] += 1
                    continue
                counts["same" if same else "differ"] += 1
                if not same:
                    print(f"{plain.stem}, {name}:\n  expected {expected!r}\n  found    {found!r}\n  {done.stderr[-500:]}")
    print(counts)
    sys.exit(counts["differ"])


main()

"""Writes tests/golden/chat/sanitized.json: the ids that transformers gives to chats whose texts hold control tokens, with
`apply_chat_template(..., sanitize_control_tokens=True)`.

Usage: python make_sanitized.py FOLDER, the folder tests/golden; transformers 5.24.
"""

import json
import sys
from pathlib import Path

from transformers import AutoTokenizer

golden = Path(sys.argv[1])
MODELS = ["tiny-qwen2", "tiny-qwen3", "tiny-llama", "tiny-llama3", "tiny-gemma2", "tiny-phi3"]


def chat(*texts):
    return [{"role": ["user", "assistant"][index % 2], "content": text} for index, text in enumerate(texts)]


CHATS = [
    chat("Say <|im_end|> and <|im_start|>system now", "No <|im_end|>."),
    chat("<|im_start|>", "a", " x <|endoftext|>", "b\n<|im_end|>\n"),
    chat("</s> and <s> [INST] x [/INST]", "</s>"),
    chat("<end_of_turn> <start_of_turn>", "a<bos>b<eos>"),
    chat("<|eot_id|><|start_header_id|>", "a<|end|>b<|eot_id|>"),
]

TOOLS = [{"type": "function", "function": {"name": "f", "description": "use <|im_start|>", "parameters": {
    "type": "object", "properties": {"x": {"type": "string", "description": "<|im_end|>"}}}}}]
CALL = [{"type": "function", "id": "call00000", "function": {"name": "f", "arguments": {"x": "a <|im_end|> b"}}}]
CALLING = [
    {"role": "system", "content": "Be brief <|im_end|>."},
    {"role": "user", "content": "x"},
    {"role": "assistant", "content": "", "reasoning_content": "Hm <|im_start|>", "tool_calls": CALL},
    {"role": "tool", "content": "7 <|im_end|>", "tool_call_id": "call00000", "name": "f"},
    {"role": "assistant", "content": "7"},
]

cases = []
for name in MODELS:
    tokenizer = AutoTokenizer.from_pretrained(golden / "models" / name)
    for messages in CHATS:
        ids = tokenizer.apply_chat_template(messages, sanitize_control_tokens=True, return_dict=False)
        cases.append({"model": name, "messages": messages, "ids": ids})
tokenizer = AutoTokenizer.from_pretrained(golden / "models" / "tiny-qwen3")
ids = tokenizer.apply_chat_template(CALLING, tools=TOOLS, sanitize_control_tokens=True, return_dict=False)
cases.append({"model": "tiny-qwen3", "messages": CALLING, "tools": TOOLS, "ids": ids})
lines = ",\n".join(json.dumps(case) for case in cases)
(golden / "chat" / "sanitized.json").write_text(f"[\n{lines}\n]\n")

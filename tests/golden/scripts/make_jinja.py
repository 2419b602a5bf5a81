"""Writes tests/golden/jinja/cases.json: small templates, and the text that transformers prints for
them.

    python make_jinja.py tests/golden/jinja/cases.json
    python make_jinja.py --templates FOLDER... --out FILE

The second form writes every `*.jinja` under the folders (and each `chat_template` of a
tokenizer_config.json) with about ten chats each, for the extra check of tests/lib/data/jinja.rs.
Its file holds no text of a template, only its path. Needs transformers 5.24 and jinja2 3.1.6.
"""
import argparse
import copy
import datetime
import json
import pathlib

from jinja_cases import CASES, CHATS, MESSAGES, TOKENS, TOOLS
from transformers.utils.chat_template_utils import _compile_jinja_template, _render_with_assistant_indices


def rendered(text, messages, tools, prompt, tokens):
    """Returns the text and the assistant's spans in characters, or the error."""
    try:
        template = _compile_jinja_template(text)
        output, spans = _render_with_assistant_indices(
            compiled_template=template,
            messages=copy.deepcopy(messages),
            tools=copy.deepcopy(tools),
            documents=None,
            add_generation_prompt=prompt,
            **tokens,
        )
        return {"text": output, "spans": [list(span) for span in spans]}
    except Exception as error:  # noqa: BLE001: any error is a refusal
        return {"error": f"{type(error).__name__}: {error}"[:200]}


def one_liners(out):
    cases = []
    for kind, texts in CASES.items():
        for index, text in enumerate(texts):
            result = rendered(text, MESSAGES, TOOLS, False, TOKENS)
            if " at 0x" in result.get("text", ""):
                print(f"left out, for it prints an address: {text}")
                continue
            expected = {"error": result["error"]} if "error" in result else {"text": result["text"]}
            cases.append({"name": f"{kind}-{index}", "template": text, **expected})
    document = {"messages": MESSAGES, "tools": TOOLS, "cases": cases}
    out.write_text(json.dumps(document, ensure_ascii=False, indent=1) + "\n")
    print(len(cases), "cases,", sum("error" in case for case in cases), "refused")


def templates_of(path):
    if path.name.endswith(".jinja"):
        return [("", path.read_bytes().decode())]
    template = json.loads(path.read_text()).get("chat_template")
    if isinstance(template, str):
        return [("", template)]
    if isinstance(template, list):
        return [(entry["name"], entry["template"]) for entry in template]
    return list((template or {}).items())


def whole_templates(folders, out):
    results, now = [], datetime.datetime.now().astimezone().isoformat()
    for folder in folders:
        files = sorted([*folder.rglob("*.jinja"), *folder.rglob("tokenizer_config.json")])
        for path in files:
            for name, text in templates_of(path):
                for chat in CHATS:
                    for prompt in (False, True):
                        result = rendered(text, chat["messages"], chat.get("tools"), prompt, TOKENS)
                        results.append({"path": str(path.resolve()), "name": name, "chat": chat["name"],
                                        "prompt": prompt, **result})
    out.write_text(json.dumps({"now": now, "chats": CHATS, "tokens": TOKENS, "results": results}, ensure_ascii=False))
    print(len(results), "renderings,", sum("error" in result for result in results), "refused")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out", nargs="?", type=pathlib.Path)
    parser.add_argument("--templates", nargs="+", type=pathlib.Path)
    parser.add_argument("--out", dest="whole", type=pathlib.Path)
    args = parser.parse_args()
    if args.templates:
        whole_templates(args.templates, args.whole)
    else:
        one_liners(args.out)


main()

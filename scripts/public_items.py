#!/usr/bin/env python3
"""List the public items of each crate and who names them outside the crate.

    scripts/public_items.py            prints the table, and fails on an item without a user
    scripts/public_items.py --items    prints each item with its users too
    scripts/public_items.py --tests    prints the items that only tests name too

An item of crates/NAME has a user if its name occurs as a word of code in a crate that depends on
NAME, in src, examples, datasets or tests. An item without a user is accepted if it stands in the
signature, as a field or in a variant of a public item of its crate that has a user, or as an
associated type: a caller gets it without naming it. So is one that an exported macro names.

The comparison is by names alone. It cannot see

- an item whose name occurs elsewhere by chance, as `new` always does: more items may lack a user;
- derived code; and the path of a name: an item `pub` in a private module counts as public.
"""

import argparse
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
WORD = re.compile(r"[A-Za-z_]\w*")
ITEM = re.compile(
    r"^(?P<indent>[ ]*)(?P<kind>pub (?:const |unsafe |async |extern \"C\" )*"
    r"(?:fn|struct|enum|union|trait|const|static|type|mod)|macro_rules!) (?:mut )?(?P<name>\w+)",
    re.MULTILINE,
)
# Comments and strings, which name no items.
NO_CODE = re.compile(r'//[^\n]*|/\*.*?\*/|b?r#".*?"#|b?"(?:\\.|[^"\\])*"', re.DOTALL)


class Item:
    """A public item: its kind, name and location, and the names that a caller of it meets."""

    def __init__(self, crate, path, text, match):
        self.crate, self.name = crate, match["name"]
        self.kind = match["kind"].split()[-1].rstrip("!")
        self.at = f"{path}:{text.count(chr(10), 0, match.start()) + 1}"
        self.users = set()
        self.met = set(WORD.findall(signature(text, match, self.kind))) - {self.name}


def signature(text, match, kind):
    """Returns the part of an item that callers meet."""
    rest = text[match.end() :]
    head = re.match(r"[^{;]*", rest).group()
    if kind in ("fn", "const", "static"):
        return head.split(" = ")[0]
    if kind in ("type", "mod") or rest[len(head) : len(head) + 1] == ";":
        return head if kind != "mod" else ""
    end = re.search(rf"^{match['indent']}\}}", rest, re.MULTILINE)
    body = rest[: end.start() if end else len(rest)]
    if kind == "struct":
        return head + " ".join(re.findall(r"^\s*pub [^\n]*", body, re.MULTILINE))
    return body


def code(text):
    """Returns Rust code with comments and strings blanked, which keeps its lines."""
    return NO_CODE.sub(lambda found: re.sub(r"[^\n]", " ", found.group()), text)


def without_tests(text):
    """Returns the code in front of the unit tests of a file."""
    return re.split(r"#\[cfg\((?:all\()?test[^\n]*\]\n(?:#\[[^\n]*\]\n)*(?:pub(?:\(\w+\))? )?mod \w+ \{", text)[0]


def part_of(path):
    """Returns the crate of a file, or its folder at the top level."""
    parts = path.split("/")
    return parts[1] if parts[0] == "crates" else parts[0]


def dependents():
    """Returns the crates above each crate, and the folders at the top level, which see all."""
    manifests = {path.parent.name: path.read_text() for path in ROOT.glob("crates/*/Cargo.toml")}
    below = {name: set(re.findall(r"^finetune-(\w+) = ", text, re.MULTILINE)) for name, text in manifests.items()}
    for _ in below:
        below = {name: seen.union(*(below[other] for other in seen)) for name, seen in below.items()}
    top = {"src", "examples", "datasets", "tests"}
    return {name: top | {other for other, seen in below.items() if name in seen} for name in below}


def read():
    """Returns public items, the words of each crate and folder, and associated types by crate."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.rs"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.split()
    items, words, met = [], {}, {}
    for path in (path for path in sorted(set(listed)) if (ROOT / path).exists()):
        text, part = code((ROOT / path).read_text()), part_of(path)
        own = without_tests(text)
        is_test = re.search(r"(^|/)tests?(/|\.rs$)|_tests\.rs$", path)
        words.setdefault("tests" if is_test else part, set()).update(WORD.findall(own))
        words.setdefault("tests", set()).update(WORD.findall(text[len(own) :]))
        if path.startswith("crates/") and not is_test:
            types = re.findall(r"^\s+type \w+ = [^;]*;", own, re.MULTILINE)
            met.setdefault(part, set()).update(WORD.findall(" ".join(types)))
            for match in ITEM.finditer(own):
                exported = re.search(r"#\[macro_export\]\s*$", own[: match.start()])
                if exported or not match["kind"].startswith("macro"):
                    items.append(Item(part, path, own, match))
    return items, words, met


def accept_met(items, met):
    """Returns the items without a user that no used item of their crate hands to its callers."""
    unused = [item for item in items if not item.users]
    for item in items:
        if item.users:
            met[item.crate].update(item.met)
    while True:
        reached = [item for item in unused if item.name in met[item.crate]]
        if not reached:
            return unused
        for item in reached:
            unused.remove(item)
            met[item.crate].update(item.met)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--items", action="store_true", help="print each item with its users")
    parser.add_argument("--tests", action="store_true", help="print items that only tests name")
    args = parser.parse_args()
    (items, words, met), above = read(), dependents()
    for item in items:
        item.users = {part for part in above[item.crate] if item.name in words.get(part, ())}
    print("| crate | public items | only by tests | used by |\n|---|--:|--:|---|")
    for crate in sorted({item.crate for item in items}):
        own = [item for item in items if item.crate == crate]
        tests_only = [item for item in own if item.users == {"tests"}]
        users = ", ".join(sorted(set().union(*(item.users for item in own))))
        print(f"| {crate} | {len(own)} | {len(tests_only)} | {users} |")
        for item in own if args.items else tests_only if args.tests else ():
            print(f"    {item.at} {item.kind} {item.name}: {', '.join(sorted(item.users))}")
    without = accept_met(items, met)
    for item in without:
        print(f"{item.at}: no other crate names {item.kind} `{item.name}`", file=sys.stderr)
    if without:
        sys.exit("make these items `pub(crate)` or private, or remove them")


if __name__ == "__main__":
    main()

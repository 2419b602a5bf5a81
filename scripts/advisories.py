#!/usr/bin/env python3
"""Renews .ci/advisories.toml, the copy of RustSec's advisories that tests/house/dependencies.rs reads.

    git clone https://github.com/RustSec/advisory-db
    scripts/advisories.py advisory-db > .ci/advisories.toml

Kept are the id, the crate and the versions of each advisory that was not withdrawn; the database is public domain (CC0-1.0).
Needs git and python3 from 3.11 on.
"""
import json
import re
import subprocess
import sys
import tomllib


def git(folder, *words):
    return subprocess.run(["git", "-C", folder, *words], check=True, capture_output=True, text=True).stdout


def ranges(texts):
    # `>=0.4.20` and `>= 0.4.20` are one; without an operator a range is exact there and a caret in Cargo's.
    return [re.sub(r"^(?=\d)", "=", text.strip()) for text in texts]


def main(folder):
    commit, date = git(folder, "log", "-1", "--format=%H %cs").split()
    print("# Advisories of https://github.com/RustSec/advisory-db (CC0-1.0), made by scripts/advisories.py.")
    print(f'commit = "{commit}"\ndate = "{date}"\n\n[advisories]')
    names = git(folder, "ls-tree", "-r", "--name-only", "HEAD", "crates").split()
    for name in sorted(names, key=lambda name: name.rsplit("/", 1)[1]):
        if not name.endswith(".md"):
            continue
        text = git(folder, "show", f"HEAD:{name}")
        told = tomllib.loads(re.search(r"```toml\n(.*?)```", text, re.S).group(1))
        about, versions = told["advisory"], told.get("versions", {})
        if "withdrawn" in about:
            continue
        fields = {"package": about["package"]}
        if "informational" in about:
            fields["informational"] = about["informational"]
        fields["patched"] = ranges(versions.get("patched", []))
        fields["unaffected"] = ranges(versions.get("unaffected", []))
        inside = ", ".join(f"{key} = {json.dumps(value)}" for key, value in fields.items())
        print(f"{about['id']} = {{ {inside} }}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])

#!/usr/bin/env python3
"""Takes docs/plan.png and docs/report.png anew, whole pages in full colour, with a headless
Chromium.

    python3 scripts/page_pictures.py --binary target/release/finetune
    optipng -o5 docs/plan.png docs/report.png

Plans the 7B of docs/sizing.md and runs the quickstart, in temporary folders. Needs Python 3 and
chromium. Look at both pictures before you commit them.
"""

import argparse
import json
import re
import subprocess
import tempfile
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"
LLAMA_7B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 32, "vocab_size": 32000,
}
QUIET = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--hide-scrollbars"]  # fmt: skip
# A script asks the page for its height, and writes it into the title.
ASK = "<script>document.title = Math.ceil(document.documentElement.getBoundingClientRect().height)</script></body>"


def browse(browser, place, page, width, height, *more):
    line = [browser, *QUIET, f"--user-data-dir={place / 'profile'}", f"--window-size={width},{height}", *more, page.as_uri()]
    return subprocess.run(line, check=True, capture_output=True, text=True, timeout=120).stdout


def picture(browser, place, page, width, to):
    """Takes a picture of the whole page, as high as it is at this width."""
    asking = place / "asking.html"
    asking.write_text(page.read_text().replace("</body>", ASK))
    height = int(re.search(r"<title>(\d+)</title>", browse(browser, place, asking, width, 1000, "--dump-dom"))[1])
    browse(browser, place, page, width, height, f"--screenshot={to}")
    print(f"{to}: {width} x {height}, {to.stat().st_size} bytes")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", required=True, type=Path)
    parser.add_argument("--browser", default="chromium")
    parser.add_argument("--docs", type=Path, default=DOCS)
    args = parser.parse_args()
    binary = args.binary.resolve()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "llama-7b").mkdir()
        (place / "llama-7b/config.json").write_text(json.dumps(LLAMA_7B))
        plan = ["plan", "--model", "llama-7b", "--on", "8xA100-80GB", "--set", "parallel.strategy=fsdp", "--html", "plan.html"]
        for words in (plan, ["--recipe", "quickstart", "--output", "out"]):
            subprocess.run([binary, *words, "--quiet"], cwd=place, check=True, stdout=subprocess.DEVNULL)
        picture(args.browser, place, place / "plan.html", 1120, args.docs / "plan.png")
        picture(args.browser, place, place / "out/report.html", 1180, args.docs / "report.png")


if __name__ == "__main__":
    main()

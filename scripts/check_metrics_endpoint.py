#!/usr/bin/env python3
"""Scrapes a run of `finetune`, and compares its page with its metrics.jsonl, and the dashboard with
the page.

    scripts/check_metrics_endpoint.py                  runs target/debug/finetune
    scripts/check_metrics_endpoint.py --binary PATH    or this one
    scripts/check_metrics_endpoint.py --prometheus /usr/bin/prometheus [--promtool PATH]
                                                       lets a real Prometheus scrape the run

The run is the quickstart on two ranks, with `--prometheus` a longer one: no network but the
loopback, some seconds to a minute. Every page must equal, to the digit, the metrics line of its
step. With `--prometheus`, promtool (beside it) checks a page. Prometheus, on the loopback and in a
temporary folder, scrapes the run each second; every stored value must be that of a line, and each
query of docs/grafana.json must have an answer. Exit code 1 comes with the error.
"""

import argparse
import json
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STEP = {
    "finetune_epochs": "epoch", "finetune_loss_nats": "loss", "finetune_learning_rate": "learning_rate",
    "finetune_gradient_norm": "grad_norm", "finetune_step_tokens": "tokens",
    "finetune_tokens_per_second": "tokens_per_sec", "finetune_step_seconds": "step_secs",
    "finetune_peak_memory_bytes": "peak_bytes", "finetune_mfu_ratio": "mfu", "finetune_hfu_ratio": "hfu",
}
EVAL = {
    "finetune_eval_loss_nats": "eval_loss", "finetune_eval_perplexity": "eval_perplexity",
    "finetune_eval_tokens": "eval_tokens", "finetune_eval_token_accuracy_ratio": "eval_token_accuracy",
    "finetune_eval_exact_match_ratio": "eval_exact_match",
}
PARTS = ["data", "forward", "backward", "exposed", "update", "save", "other"]
SAMPLE = re.compile(r'^(\w+)(?:\{(.*)\})? (\S+)$')


def require(holds: bool, text: str) -> None:
    if not holds:
        raise ValueError(text)


def fetch(url: str, timeout: float = 5) -> str:
    with urllib.request.urlopen(url, timeout=timeout) as answer:
        return answer.read().decode()


def samples(page: str) -> dict[str, float]:
    """Returns the values by name, with their labels as written."""
    found = {}
    for line in page.splitlines():
        if line.startswith("#"):
            continue
        match = SAMPLE.match(line)
        require(match is not None, f"no sample: {line}")
        name, labels, value = match.groups()
        found[name + (f"{{{labels}}}" if labels else "")] = float(value)
    return found


def expected(step: dict, ranks: int) -> dict[str, float]:
    """Returns the values that a page must have for the line of a step."""
    values = {name: step[field] for name, field in STEP.items()}
    values |= {f'finetune_step_part_seconds{{part="{part}"}}': step[f"{part}_secs"] for part in PARTS}
    values |= {f'finetune_rank_seconds{{rank="{rank}"}}': step["rank_secs"][rank] for rank in range(ranks)}
    return values


def compare(pages: list[dict[str, float]], lines: list[dict], ranks: int) -> int:
    """Returns the number of pages that equal their lines."""
    steps = {line["step"]: line for line in lines if "loss" in line}
    evals = {line["step"]: line for line in lines if "eval_loss" in line}
    compared = 0
    for page in pages:
        if "finetune_eval_step" in page:
            line = evals[int(page["finetune_eval_step"])]
            for name, field in EVAL.items():
                require(page[name] == line[field], f"{name} is {page[name]}, the line has {line[field]}")
        if "finetune_step" not in page:
            continue
        number = int(page["finetune_step"])
        for name, value in expected(steps[number], ranks).items():
            require(page[name] == value, f"{name} of step {number} is {page[name]}, the line has {value}")
        tokens = sum(line["tokens"] for at, line in steps.items() if at <= number)
        require(page["finetune_tokens_total"] == tokens, f"tokens of step {number}")
        require(page["finetune_steps_total"] == number, f"steps at step {number}")
        compared += 1
    return compared


def queries() -> list[str]:
    dashboard = json.loads((ROOT / "docs/grafana.json").read_text())
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


def check_dashboard(names: set[str]) -> None:
    for query in queries():
        for name in re.findall(r"\bfinetune_\w+", query):
            require(name in names, f"docs/grafana.json asks for {name}, which is not served")


class Prometheus:
    """A Prometheus server that scrapes one address each second."""

    def __init__(self, binary: str, target: str, folder: Path):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        config = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
            "scrape_configs": [{"job_name": "finetune", "static_configs": [{"targets": [target]}]}],
        }
        # JSON is YAML.
        (folder / "prometheus.yml").write_text(json.dumps(config))
        self.log = (folder / "prometheus.log").open("w")
        self.process = subprocess.Popen(
            [binary, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
             f"--web.listen-address=127.0.0.1:{port}"],
            stdout=self.log, stderr=self.log,
        )

    def query(self, expr: str, window: str = "") -> list[dict]:
        asked = urllib.parse.urlencode({"query": f"{expr}{window}"})
        return json.loads(fetch(f"{self.url}/api/v1/query?{asked}"))["data"]["result"]

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=30)


def check_prometheus(prometheus: Prometheus, lines: list[dict], promtool: str | None, page: str) -> str:
    if promtool:
        done = subprocess.run([promtool, "check", "metrics"], input=page, text=True, capture_output=True)
        require(done.returncode == 0, f"promtool: {done.stdout}{done.stderr}")
    steps = [line for line in lines if "loss" in line]
    held = 0
    for name, field in STEP.items():
        allowed = {line[field] for line in steps}
        found = [float(value) for series in prometheus.query(name, "[30m]") for _, value in series["values"]]
        require(len(found) > 0, f"Prometheus holds no {name}")
        for value in found:
            require(value in allowed, f"Prometheus holds {name} = {value}, which is in no line")
        held += len(found)
    answered = 0
    for query in queries():
        asked = query.replace("$run", ".*")
        # The run may be over: query the time at which it last existed.
        result = prometheus.query(f"last_over_time(({asked})[30m:1s])")
        require(len(result) > 0, f"no answer to {asked}")
        answered += 1
    return f"Prometheus holds {held} values, all of lines; {answered} queries of the dashboard answered"


def run(args: argparse.Namespace, folder: Path) -> str:
    sets = ["log.metrics_address=127.0.0.1:0", "log.peak_tflops=0.1", "log.tensorboard=false"]
    command = [args.binary, "--recipe", "quickstart", "--output", str(folder / "out"), "--ranks", "2"]
    if args.prometheus:
        # Prometheus takes some seconds to start.
        sets.append("train.epochs=15")
    for pair in sets + args.set:
        command += ["--set", pair]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    prometheus, pages, text = None, [], ""
    try:
        said = []
        for line in child.stderr:
            said.append(line)
            if line.startswith("metrics at "):
                break
        require(bool(said) and said[-1].startswith("metrics at "), "".join(said))
        url = said[-1].split()[2]
        if args.prometheus:
            prometheus = Prometheus(args.prometheus, url.split("/")[2], folder)
        while child.poll() is None:
            try:
                text = fetch(url)
                pages.append(samples(text))
            except OSError:
                break
            time.sleep(0.02)
        rest = child.stderr.read()
        require(child.wait() == 0, "".join(said) + rest)
        lines = [json.loads(line) for line in (folder / "out/metrics.jsonl").read_text().splitlines()]
        compared = compare(pages, lines, 2)
        require(compared >= 3, f"only {compared} pages were read while the run had steps")
        # Only a step that diverges has these.
        declared = set(re.findall(r"^\| `(finetune_\w+)", (ROOT / "docs/monitoring.md").read_text(), re.M))
        served = {name.split("{")[0] for page in pages for name in page}
        require(declared - served == {"finetune_rolled_back_to_step"}, f"never served: {declared - served}")
        require(served <= declared, f"not in docs/monitoring.md: {served - declared}")
        check_dashboard(served)
        report = f"{compared} pages of {len({p.get('finetune_step') for p in pages})} moments equal metrics.jsonl"
        if prometheus:
            report += "; " + check_prometheus(prometheus, lines, args.promtool, text)
        return report
    finally:
        if child.poll() is None:
            child.kill()
        if prometheus:
            prometheus.stop()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", default=str(ROOT / "target/debug/finetune"))
    parser.add_argument("--prometheus", help="the server's binary")
    parser.add_argument("--promtool", help="its tool; checks a page")
    parser.add_argument("--set", action="append", default=[], help="further keys of the recipe")
    args = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory() as folder:
            print(run(args, Path(folder)))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

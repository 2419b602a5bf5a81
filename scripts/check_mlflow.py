#!/usr/bin/env python3
"""Lets `finetune` log to a real MLflow server, and compares the server's data with metrics.jsonl.

    python3 -m venv venv && venv/bin/pip install mlflow
    scripts/check_mlflow.py --mlflow venv/bin/mlflow [--binary PATH]

Starts `mlflow server` on the loopback over a temporary SQLite file, trains the quickstart with
`log.mlflow`, and reads experiment, run, parameters and the whole history of every metric back over
REST. Each value, step and parameter must exist once, to the digit, and the run must be FINISHED. A
second run, stopped by a signal, must be KILLED. Exit code 1 comes with the error.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def require(holds: bool, text: str) -> None:
    if not holds:
        raise ValueError(text)


class Server:
    """An MLflow server on the loopback."""

    def __init__(self, mlflow: str, folder: Path):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = (folder / "mlflow.log").open("w")
        self.process = subprocess.Popen(
            [mlflow, "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
             "--backend-store-uri", f"sqlite:///{folder}/mlflow.db",
             "--default-artifact-root", str(folder / "artifacts")],
            # The server's own children end with it.
            stdout=self.log, stderr=self.log, cwd=folder, start_new_session=True,
        )
        until = time.time() + 120
        while True:
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=2).close()
                return
            except OSError:
                require(self.process.poll() is None and time.time() < until, (folder / "mlflow.log").read_text())
                time.sleep(0.5)

    def get(self, path: str, **asked: str) -> dict:
        url = f"{self.url}/api/2.0/mlflow/{path}?{urllib.parse.urlencode(asked)}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            return json.load(answer)

    def runs(self, experiment: str) -> list[dict]:
        known = self.get("experiments/get-by-name", experiment_name=experiment)["experiment"]["experiment_id"]
        body = json.dumps({"experiment_ids": [known], "order_by": ["attributes.start_time ASC"]}).encode()
        asked = urllib.request.Request(f"{self.url}/api/2.0/mlflow/runs/search", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked, timeout=30) as answer:
            return json.load(answer).get("runs", [])

    def history(self, run: str, key: str) -> list[tuple[int, float]]:
        found = self.get("metrics/get-history", run_id=run, metric_key=key, max_results="25000")
        return [(int(one["step"]), float(one["value"])) for one in found.get("metrics", [])]

    def stop(self) -> None:
        os.killpg(self.process.pid, signal.SIGTERM)
        self.process.wait(timeout=60)


def start(binary: str, server: Server, output: Path, *sets: str) -> subprocess.Popen:
    command = [binary, "--recipe", "quickstart", "--output", str(output), "--ranks", "2"]
    for pair in (f"log.mlflow={server.url}", "log.mlflow_experiment=short stories & more", *sets):
        command += ["--set", pair]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=ROOT)


def figures(output: Path) -> dict[str, list[tuple[int, float]]]:
    """Returns every figure of metrics.jsonl by its key, with its steps."""
    found: dict[str, list[tuple[int, float]]] = {}
    for line in (output / "metrics.jsonl").read_text().splitlines():
        entry = json.loads(line)
        step = entry.pop("step")
        for key, value in entry.items():
            parts = [(f"{key}/{at}", one) for at, one in enumerate(value)] if isinstance(value, list) else [(key, value)]
            for name, one in parts:
                found.setdefault(name, []).append((step, float(one)))
    return found


def check(server: Server, args: argparse.Namespace, folder: Path) -> str:
    output = folder / "first"
    run = start(args.binary, server, output, "log.peak_tflops=0.1")
    _, said = run.communicate(timeout=1800)
    require(run.returncode == 0, said)
    require("warning" not in said, said)
    logged = server.runs("short stories & more")
    require(len(logged) == 1, f"{len(logged)} runs")
    info, data = logged[0]["info"], logged[0]["data"]
    require(info["status"] == "FINISHED", info["status"])
    require(info["run_name"] == "first", info["run_name"])
    wanted = figures(output)
    require({one["key"] for one in data["metrics"]} == set(wanted), "other metrics than metrics.jsonl has")
    for key, values in wanted.items():
        history = server.history(info["run_id"], key)
        require(sorted(history) == sorted(values), f"{key}: {history[:3]} and not {values[:3]}")
    recipe = tomllib.loads((output / "recipe.toml").read_text())
    keys = {f"{section}.{key}" for section, table in recipe.items() for key in table}
    params = {one["key"]: one["value"] for one in data["params"]}
    require(set(params) == keys, f"parameters: {set(params) ^ keys}")
    rate = recipe["optimizer"]["learning_rate"]
    require(float(params["optimizer.learning_rate"]) == rate, params["optimizer.learning_rate"])
    # A run that a signal stops.
    stopped = start(args.binary, server, folder / "second", "train.max_steps=100000")
    while len(logged := server.runs("short stories & more")) < 2 or not logged[1]["data"].get("metrics"):
        require(stopped.poll() is None, "the second run ended before it was stopped")
        time.sleep(0.2)
    stopped.send_signal(signal.SIGTERM)
    stopped.communicate(timeout=120)
    require(stopped.returncode == 85, f"a stopped run left {stopped.returncode}")
    status = server.runs("short stories & more")[1]["info"]["status"]
    require(status == "KILLED", status)
    values = sum(len(one) for one in wanted.values())
    return f"{values} values of {len(wanted)} metrics and {len(params)} parameters as they are; FINISHED and KILLED"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mlflow", required=True, help="the command of the package mlflow")
    parser.add_argument("--binary", default=str(ROOT / "target/debug/finetune"))
    args = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory() as name:
            server = Server(args.mlflow, Path(name))
            try:
                print(check(server, args, Path(name)))
            finally:
                server.stop()
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

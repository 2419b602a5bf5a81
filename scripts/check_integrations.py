#!/usr/bin/env python3
"""Runs each script of integrations/ against its real package, and compares what it stored with
metrics.jsonl.

    python3 -m venv venv && venv/bin/pip install wandb mlflow trackio comet_ml swanlab
    venv/bin/python scripts/check_integrations.py [--binary PATH] [NAME ...]

Nothing leaves this machine: the offline modes of the packages, and an MLflow server on the
loopback. For each package, it trains six steps of the quickstart, then a long run that it stops by
a signal, resumes, and stops again. Every figure of metrics.jsonl must be stored once, with its step
and to the digit. The resumed run must go on in the same record. Exit code 1 comes with the error.
"""

import argparse
import importlib.metadata
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

Figures = dict[str, list[tuple[int, float]]]


def require(holds: bool, text: str) -> None:
    if not holds:
        raise ValueError(text)


class Store:
    """What a package has stored of the runs in `folder`."""

    package = ""
    # The end of a run in the words of the package, for a finished and for a stopped run.
    ends = ("finished", "stopped")

    def __init__(self, folder: Path):
        self.folder = folder

    def environment(self) -> dict[str, str]:
        return {}

    def points(self, run: str) -> Iterator[tuple[str, int, float]]:
        """Yields key, step and value of each stored figure."""
        raise NotImplementedError

    def end(self, run: str) -> str:
        raise NotImplementedError

    def records(self, run: str) -> int:
        """Returns the number of runs that the tool shows."""
        raise NotImplementedError

    def close(self) -> None:
        pass


class Wandb(Store):
    package = "wandb"
    ends = ("0", "0")

    def environment(self) -> dict[str, str]:
        return {"WANDB_MODE": "offline", "WANDB_DIR": str(self.folder)}

    def entries(self, run: str) -> Iterator:
        from wandb.proto import wandb_internal_pb2

        for file in sorted(self.folder.glob(f"wandb/offline-run-*-{self.id(run)}/run-*.wandb")):
            for data in leveldb_log(file.read_bytes()[7:], 7):
                record = wandb_internal_pb2.Record()
                record.ParseFromString(data)
                yield record

    def id(self, run: str) -> str:
        return (self.folder / run / "wandb_run_id").read_text()

    def points(self, run: str) -> Iterator[tuple[str, int, float]]:
        for record in self.entries(run):
            items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            step = record.history.step.num
            yield from ((key, step, float(value)) for key, value in items.items() if not key.startswith("_"))

    def end(self, run: str) -> str:
        return str([record.exit.exit_code for record in self.entries(run) if record.HasField("exit")][-1])

    def records(self, run: str) -> int:
        return len({record.run.run_id for record in self.entries(run) if record.HasField("run")})


def leveldb_log(data: bytes, used: int) -> Iterator[bytes]:
    """Yields the records of a LevelDB log whose first block has `used` bytes before `data`."""
    at, whole = 0, b""
    while at + 7 <= len(data):
        left = 32768 - (at + used) % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at:at + 7])
        whole += data[at + 7:at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield whole
            whole = b""


class Mlflow(Store):
    package = "mlflow"
    ends = ("FINISHED", "KILLED")

    def __init__(self, folder: Path):
        super().__init__(folder)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        log = folder / "mlflow.log"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
             "--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--default-artifact-root", str(folder / "artifacts")],
            # The server's own children end with it.
            stdout=log.open("w"), stderr=subprocess.STDOUT, cwd=folder, start_new_session=True,
        )
        until = time.time() + 120
        while True:
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=2).close()
                break
            except OSError:
                if self.process.poll() is not None or time.time() > until:
                    self.close()
                    raise ValueError(log.read_text()) from None
                time.sleep(0.5)
        import mlflow

        self.client = mlflow.MlflowClient(self.url)

    def environment(self) -> dict[str, str]:
        return {"MLFLOW_TRACKING_URI": self.url, "MLFLOW_EXPERIMENT_NAME": "short stories & more"}

    def runs(self, name: str) -> list:
        experiment = self.client.get_experiment_by_name("short stories & more")
        return self.client.search_runs([experiment.experiment_id], f"attributes.run_name = '{name}'")

    def points(self, run: str) -> Iterator[tuple[str, int, float]]:
        found = self.runs(run)[0]
        for key in found.data.metrics:
            for one in self.client.get_metric_history(found.info.run_id, key):
                yield key, one.step, one.value

    def end(self, run: str) -> str:
        found = self.runs(run)[0]
        require(found.data.params["train.micro_batch_size"] != "", "no parameter of the recipe")
        return found.info.status

    def records(self, run: str) -> int:
        return len(self.runs(run))

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            self.process.wait(timeout=60)


class Trackio(Store):
    package = "trackio"
    # It stores no status.
    ends = ("", "")

    def environment(self) -> dict[str, str]:
        return {"TRACKIO_DIR": str(self.folder / "trackio")}

    def storage(self):
        # The package reads the variable when it is imported.
        os.environ.update(self.environment())
        from trackio.sqlite_storage import SQLiteStorage

        return SQLiteStorage

    def points(self, run: str) -> Iterator[tuple[str, int, float]]:
        for entry in self.storage().get_logs("finetune", run):
            step = entry.pop("step")
            yield from ((key, step, float(value)) for key, value in entry.items() if key != "timestamp")

    def end(self, run: str) -> str:
        return ""

    def records(self, run: str) -> int:
        return sum(name == run for name in self.storage().get_runs("finetune"))


class Comet(Store):
    package = "comet_ml"

    def environment(self) -> dict[str, str]:
        return {"COMET_OFFLINE_DIRECTORY": str(self.folder / "comet"), "COMET_API_KEY": ""}

    def files(self, run: str) -> list[Path]:
        key = (self.folder / run / "comet_experiment_key").read_text()
        return sorted((self.folder / "comet").glob(f"{key}*.zip"), key=lambda file: file.stat().st_mtime)

    def messages(self, run: str) -> Iterator[tuple[str, dict]]:
        for file in self.files(run):
            with zipfile.ZipFile(file) as archive:
                for line in archive.read("messages.json").decode().splitlines():
                    message = json.loads(line)
                    yield message["type"], message["payload"]

    def points(self, run: str) -> Iterator[tuple[str, int, float]]:
        for kind, message in self.messages(run):
            # Comet adds figures of the system.
            if kind == "metric_msg" and not message["metric"]["metricName"].startswith(("sys.", "process ")):
                metric = message["metric"]
                yield metric["metricName"], metric["step"], float(metric["metricValue"])

    def end(self, run: str) -> str:
        ends = [m["value"] for kind, m in self.messages(run) if kind == "log_other" and m["key"] == "status"]
        return ends[-1]

    def records(self, run: str) -> int:
        # Each start leaves a file; all have the key of one experiment.
        return min(len(self.files(run)), 1)


class Swanlab(Store):
    package = "swanlab"
    # The local mode stores no status.
    ends = ("", "")

    def environment(self) -> dict[str, str]:
        return {"SWANLAB_MODE": "local", "SWANLAB_LOGDIR": str(self.folder / "swanlog")}

    def folders(self, run: str) -> list[Path]:
        key = (self.folder / run / "swanlab_run_id").read_text()
        return sorted((self.folder / "swanlog").glob(f"run-*-{key}"))

    def points(self, run: str) -> Iterator[tuple[str, int, float]]:
        # A start numbers its figures in the order in which they come.
        expected = read_lines(self.folder / run)
        for folder in self.folders(run):
            columns = {int(path.name): [json.loads(line) for file in sorted(path.glob("*.log"))
                                        for line in file.read_text().splitlines()]
                       for path in (folder / "logs").iterdir()}
            steps = {one["index"] for column in columns.values() for one in column}
            names = list(dict.fromkeys(key for step, figures in expected if step in steps for key in figures))
            require(sorted(columns) == list(range(1, len(names) + 1)), f"{len(columns)} figures and not {len(names)}")
            for number, name in enumerate(names, 1):
                yield from ((name, one["index"], float(one["data"])) for one in columns[number])

    def end(self, run: str) -> str:
        return ""

    def records(self, run: str) -> int:
        return min(len(self.folders(run)), 1)


STORES = {"wandb": Wandb, "mlflow": Mlflow, "trackio": Trackio, "comet": Comet, "swanlab": Swanlab}


def read_lines(output: Path) -> list[tuple[int, dict[str, float]]]:
    """Returns step and figures of each line of metrics.jsonl."""
    found = []
    for line in (output / "metrics.jsonl").read_text().splitlines():
        entry = json.loads(line)
        step, figures = entry.pop("step"), {}
        for key, value in entry.items():
            parts = [(f"{key}/{at}", one) for at, one in enumerate(value)] if isinstance(value, list) else [(key, value)]
            figures.update((name, float(one)) for name, one in parts if isinstance(one, (int, float)))
        found.append((step, figures))
    return found


def compare(store: Store, run: str) -> int:
    """Returns the number of compared values."""
    wanted: Figures = {}
    for step, figures in read_lines(store.folder / run):
        for key, value in figures.items():
            wanted.setdefault(key, []).append((step, value))
    stored: Figures = {}
    for key, step, value in store.points(run):
        stored.setdefault(key, []).append((step, value))
    require(set(stored) == set(wanted), f"other figures: {set(stored) ^ set(wanted)}")
    for key, values in wanted.items():
        require(sorted(stored[key]) == sorted(values), f"{key}: {sorted(stored[key])[:3]} and not {sorted(values)[:3]}")
    require(store.records(run) == 1, f"{store.records(run)} records of one run")
    return sum(len(values) for values in wanted.values())


def start(binary: str, name: str, store: Store, run: str, *more: str) -> subprocess.Popen:
    command = [binary, "--recipe", "quickstart", "--output", str(store.folder / run), "--ranks", "2",
               "--set", "log.peak_tflops=0.1", *more,
               "--set", f"log.command={json.dumps([sys.executable, str(ROOT / 'integrations' / f'{name}.py')])}"]
    environment = os.environ | store.environment()
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment)


def finish(process: subprocess.Popen, code: int) -> None:
    _, said = process.communicate(timeout=1800)
    require(process.returncode == code, said)
    require("warning" not in said, said)


def stop(process: subprocess.Popen, output: Path, lines: int) -> int:
    """Stops a run by a signal after some lines; returns the number of lines."""
    metrics = output / "metrics.jsonl"
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < lines:
        require(process.poll() is None, "the run ended before it was stopped")
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    finish(process, 85)
    return metrics.read_bytes().count(b"\n")


def check(name: str, binary: str, folder: Path) -> str:
    store = STORES[name](folder)
    try:
        finish(start(binary, name, store, "first", "--set", "train.max_steps=6"), 0)
        values = compare(store, "first")
        require(store.end("first") == store.ends[0], f"a finished run ends with {store.end('first')!r}")
        long = ("--set", "train.max_steps=100000")
        lines = stop(start(binary, name, store, "second", *long), folder / "second", 4)
        require(store.end("second") == store.ends[1], f"a stopped run ends with {store.end('second')!r}")
        stop(start(binary, name, store, "second", *long, "--resume"), folder / "second", lines + 3)
        values += compare(store, "second")
    finally:
        store.close()
    return f"{store.package} {importlib.metadata.version(store.package)}: {values} values of 3 starts as in metrics.jsonl"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"scripts to check, of {', '.join(STORES)}")
    parser.add_argument("--binary", default=str(ROOT / "target/debug/finetune"))
    args = parser.parse_args()
    for name in args.names or STORES:
        try:
            with tempfile.TemporaryDirectory() as folder:
                print(check(name, args.binary, Path(folder)), flush=True)
        except (ValueError, ImportError) as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

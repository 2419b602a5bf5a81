"""Runs a program and measures it from outside, in the same way for any program.

Measures wall time from the start of the process to the end of its first step, peak resident memory
and CPU time as the system counts them. On a GPU it also measures the device memory that nvidia-smi
reports above the use before. Standard library only.
"""

import os
import signal
import subprocess
import tempfile
import threading
import time
from pathlib import Path

POLL_SECS = 0.02


class DeviceMemory:
    """Peak memory of the first GPU while the block runs, above its use before."""

    QUERY = ("nvidia-smi", "--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits")

    def __init__(self, device):
        self.watch = device == "cuda"
        self.peak_bytes = None

    def __enter__(self):
        if self.watch:
            try:
                self.before = int(subprocess.check_output(self.QUERY, timeout=20).split()[0])
                self.process = subprocess.Popen((*self.QUERY, "-lms", "50"), stdout=subprocess.PIPE)
            except (OSError, ValueError, IndexError, subprocess.SubprocessError):
                self.watch = False
                return self
            self.thread = threading.Thread(target=self._read)
            self.thread.start()
        return self

    def _read(self):
        for line in self.process.stdout:
            if line.strip().isdigit():
                self.peak_bytes = max(self.peak_bytes or 0, (int(line) - self.before) << 20)

    def __exit__(self, *_):
        if self.watch:
            self.process.terminate()
            self.process.wait()
            self.thread.join()


def steps_in(metrics):
    """Returns the number of complete lines of optimizer steps in the file."""
    try:
        lines = metrics.read_bytes().split(b"\n")[:-1]
    except OSError:
        return 0
    return sum(b'"loss"' in line for line in lines)


def run(line, device, timeout, threads=0, metrics=None, end_after=None):
    """Returns the output of `line` and its figures; kills it after `timeout` seconds.

    `metrics` is the file that gets a line a step. With `end_after` the program is killed once that
    many steps are in it, so its final save is not measured.
    """
    line = [str(word) for word in line]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if threads:
        environment |= {"RAYON_NUM_THREADS": str(threads), "OMP_NUM_THREADS": str(threads)}
    shown = " ".join(Path(word).name if word.startswith("/") else word for word in line)
    result = {"command": shown, "ok": False}
    ended = False
    with DeviceMemory(device) as memory, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        start = time.monotonic()
        process = subprocess.Popen(line, stdout=out, stderr=err, env=environment)
        try:
            while (done := os.wait4(process.pid, os.WNOHANG))[0] == 0:
                elapsed = time.monotonic() - start
                steps = steps_in(metrics) if metrics else 0
                if steps:
                    result.setdefault("first_step_secs", elapsed)
                ended = end_after is not None and steps >= end_after
                if elapsed > timeout:
                    result["error"] = f"not done after {timeout:.0f} s"
                if ended or elapsed > timeout:
                    process.send_signal(signal.SIGKILL)
                time.sleep(POLL_SECS)
        except BaseException:
            process.kill()
            raise
        _, status, usage = done
        process.returncode = os.waitstatus_to_exitcode(status)
        result |= {"wall_secs": time.monotonic() - start, "cpu_secs": usage.ru_utime + usage.ru_stime}
        result["peak_rss_bytes"] = usage.ru_maxrss * 1024
        said = []
        for file in (out, err):
            file.seek(0)
            said.append(file.read().decode(errors="replace"))
    result["peak_gpu_bytes"] = memory.peak_bytes
    if process.returncode != 0 and not ended:
        result.setdefault("error", f"exit code {process.returncode}: {said[1].strip()[-2000:]}")
        return result, ""
    return result | {"ok": True, "ended_after_its_steps": ended}, said[0]

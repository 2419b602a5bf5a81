"""Tests gpu.sh with fake programs: no GPU, no model and no PyTorch are needed.

    python3 benchmarks/test_gpu.py

Tests that each part records every step, also those that fail, hang or are not reached; exit codes;
that figures are beside the right bars; and the result of side_by_side.py if PEFT runs out of
memory.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

import bars
import two_ranks

HERE = Path(__file__).resolve().parent

# Prints finetune's output; FAKE_HANG names a word of a command line that makes it hang.
FINETUNE = """
import json, os, pathlib, sys, time
words = sys.argv[1:]
if os.environ.get("FAKE_HANG") in words:
    time.sleep(100)
if words[0] == "--version":
    print("finetune 0.0.0")
elif words[0] == "doctor":
    print("all cases passed", "waits for each kernel" if os.environ.get("FINETUNE_CUDA_SYNC") == "1" else "")
    print("libraries in", os.environ.get("LD_LIBRARY_PATH", ""))
    if "--probe" in words:
        pathlib.Path(words[words.index("--probe") + 1]).write_text("[mma_16816]")
    sys.exit(1 if os.environ.get("FAKE_FAILS") in words else 0)
elif words[:2] == ["bench", "ops"]:
    def op(op, shape, share, **more):
        return {"op": op, "shape": shape, "dtype": "bf16", "ms": 1.5, "share": share} | more
    if "--algorithms" in words:
        product = op("matmul", "4096x4096 to 12288", 1, tflops=690, fastest_algorithm={"number": 3, "ms": 1.4})
        print(json.dumps({"device": "Fake H200", "copy_gbps": 4300, "gemm_tflops": 690, "ops": [product]}))
        sys.exit()
    tokens = 8192 if "8192" in words else 4096
    heads = f"{tokens}, rows of {2048 if tokens == 4096 else tokens}, 32/8 heads of 128, causal"
    print(json.dumps({"device": "Fake H200", "copy_gbps": 4300, "gemm_tflops": 780, "ops": [
        op("dequantize", "12288x4096, nf4", 0.9, gbps=3870), op("rms_norm", "4096x4096", 0.8, gbps=3440),
        op("adamw", "50331648", 0.5, gbps=2150), op("weight_norm", "4096x4096", 0.1, gbps=430),
        op("attention", heads, 0.3, tflops=210), op("attention_backward", heads, 0.1, tflops=100),
        op("linear_cross_entropy", f"{tokens}, 4096 to 151936, frozen", 0.6, tflops=460),
        op("linear_cross_entropy", f"{tokens}, 4096 to 151936, soft-cap", 0.1, tflops=80),
        op("linear_cross_entropy", f"{tokens}, 4096 to 151936, trained", 0.1, tflops=80)]}))
elif "--model" in words:
    settings = dict(word.split("=", 1) for flag, word in zip(words, words[1:]) if flag == "--set")
    number = lambda key: int(settings[key])
    output = pathlib.Path(words[words.index("--output") + 1])
    output.mkdir(parents=True)
    tokens = number("data.max_seq_len") * number("train.micro_batch_size") * number("train.gradient_accumulation_steps")
    with open(output / "metrics.jsonl", "w") as file:
        for step in range(number("train.max_steps")):
            print(json.dumps({"loss": 2.0, "step": step + 1, "tokens": tokens, "step_secs": tokens / 12500,
                              "learning_rate": 0, "grad_norm": 1, "peak_bytes": 11_000_000_000}), file=file, flush=True)
    if "profile.active" in settings:
        (output / "trace").mkdir()
        (output / "trace/ops.json").write_text("{}")
    if "adapter.r" not in settings and "adapter.path" not in settings:
        time.sleep(100)  # as one that saves all weights does
"""

# The interpreter: runs all project scripts except those that need PyTorch; its PEFT runs out of
# memory without checkpointing.
PYTHON = """
import json, os, pathlib, sys
script, words = pathlib.Path(sys.argv[1]).name, sys.argv[2:]
if script == "random_weights.py":
    folder = pathlib.Path(words[words.index("--folder") + 1])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(b"")
elif script == "peft_bench.py":
    with open(os.environ["FAKE_LOG"], "a") as log:
        log.write(" ".join(words) + "\\n")
    if "--checkpointing" not in words:
        sys.exit("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB")
    print(json.dumps({"tokens_per_sec": 5000, "peak_gpu_allocated_bytes": 44_000_000_000, "first_step_secs": 30}))
else:
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""

NVIDIA_SMI = """
import os, sys
query = next((word for word in sys.argv if word.startswith("--query-gpu=")), "")
name, memory = os.environ.get("FAKE_CARD", "NVIDIA H200:143771").split(":")
if "name" in query:
    print(f"{name}, 580.1, {memory} MiB, 4 MiB, 9.0, 700 W, 1980 MHz")
elif "memory.total" in query:
    print(memory)
elif "memory.used" in query:
    print("4")
"""

# FAKE_RACECHECK_IS_SLOW: racecheck of all kernels ends as if it had exceeded its time.
SANITIZER = """
import os, sys
if "racecheck" in sys.argv and "--kernel-name" not in sys.argv and "FAKE_RACECHECK_IS_SLOW" in os.environ:
    sys.exit(124)
program = next(i for i, word in enumerate(sys.argv) if word.endswith("finetune"))
os.execv(sys.argv[program], sys.argv[program:])
"""


class Gpu(unittest.TestCase):
    def setUp(self):
        place = tempfile.TemporaryDirectory()
        self.addCleanup(place.cleanup)
        self.place = Path(place.name)
        (self.place / "bin").mkdir()
        fakes = {"finetune": FINETUNE, "python": PYTHON, "nvidia-smi": NVIDIA_SMI, "compute-sanitizer": SANITIZER,
                 "ldd": "import os; print('libcuda.so.1 =>', os.environ.get('FAKE_LIBCUDA', '/lib'))"}  # fmt: skip
        for name, code in fakes.items():
            program = self.place / "bin" / name
            program.write_text(f"#!{sys.executable}\n{code}")
            program.chmod(0o755)
        self.log = self.place / "peft.log"
        self.log.touch()

    def start(self, *words, **variables):
        environment = os.environ | {
            "PATH": f"{self.place / 'bin'}:/usr/bin:/bin",
            "PYTHON": str(self.place / "bin/python"),
            "MODELS": str(self.place / "models"),
            "FAKE_LOG": str(self.log),
        }
        line = [HERE / "gpu.sh", self.place / "bin/finetune", self.place / "out", *words]
        return subprocess.Popen(line, env=environment | variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def run_part(self, part, *steps, **variables):
        """Returns exit code, record and table."""
        process = self.start(part, *steps, **variables)
        out, err = process.communicate()
        file = self.place / "out" / f"{part}.json"
        self.assertTrue(file.is_file(), out + err)
        self.assertTrue((self.place / "out" / f"{part}.tar.gz").is_file())
        self.assertEqual(out.strip(), file.with_suffix(".md").read_text().strip())
        return process.returncode, json.loads(file.read_text()), out

    def verdicts(self, found):
        return {row["name"]: row["verdict"] for row in found["bars"]}

    def test_what_cannot_be_done_is_said(self):
        for words, said in (((), "three arguments"), (("speed",), 'no part "speed"'), (("check", "selftset"), "none of the name")):
            process = self.start(*words)
            self.assertIn(said, process.communicate()[1])
            self.assertEqual(process.returncode, 2)

    def test_check(self):
        code, found, table = self.run_part("check")
        self.assertEqual(code, 0, table)
        self.assertEqual(list(found["parts"]), ["facts", "libraries", "doctor", "selftest", "memcheck", "racecheck"])
        self.assertTrue((self.place / "out/probe.txt").is_file())
        self.assertIn("waits for each kernel", found["parts"]["selftest"]["stdout"])
        self.assertNotIn("waits for each kernel", found["parts"]["memcheck"]["stdout"])

    def test_folders_of_libraries_that_the_loader_does_not_find(self):
        wheels = self.place / "site/nvidia"
        (wheels / "cu13/lib").mkdir(parents=True)
        mounted = ["/usr/local/cuda/lib64", "/usr/local/nvidia/lib64", "/usr/local/nvidia/lib", "/usr/lib64-nvidia",
                   "/usr/lib/wsl/lib"]  # fmt: skip
        mounted = [folder for folder in mounted if Path(folder).is_dir()]
        known = {"PYTHONPATH": str(wheels.parent), "LD_LIBRARY_PATH": "/own"}

        def folders(**variables):
            _, found, _ = self.run_part("check", "doctor", **known, **variables)
            return found["parts"]["doctor"]["stdout"].splitlines()[-1].removeprefix("libraries in ").split(":")

        self.assertEqual(folders(), ["/own"])
        self.assertEqual(folders(FAKE_LIBCUDA="not found"), ["/own", str(wheels / "cu13/lib"), *mounted])
        # Without wheels.
        (wheels / "__init__.py").write_text("__path__ = []")
        self.assertEqual(folders(FAKE_LIBCUDA="not found"), ["/own", *mounted])

    def test_racecheck_of_all_kernels_takes_too_long(self):
        code, found, table = self.run_part("check", FAKE_RACECHECK_IS_SLOW="1")
        self.assertEqual(code, 1)
        self.assertEqual(list(found["parts"])[-3:], ["racecheck", "racecheck-attention", "racecheck-cross_entropy"])
        self.assertEqual([step["ok"] for step in found["parts"].values()][-3:], [False, True, True])
        code, found, table = self.run_part("check", "racecheck-attention")
        self.assertEqual(code, 0, table)
        self.assertEqual(list(found["parts"]), ["racecheck-attention"])

    def test_the_steps_are_in_order(self):
        """An earlier step explains the failures of a later one."""
        first = ["qlora-8b", "qlora-8b-checkpointing", "model-0.6b", "lora-0.6b", "model-1.7b", "full-1.7b", "lora-8b", "model-3b",
                 "full-3b", "full-8b"]  # fmt: skip
        parts = {
            "check": ["facts", "libraries", "doctor", "selftest", "memcheck", "racecheck"],
            "kernels": ["doctor", "golden-f32", "golden-bf16", "ops", "ops-8k", "algorithms"],
            "train": ["facts", "model-8b", *first, *(f"{name}-peft" for name in first if not name.startswith("model"))],
            "ranks": ["doctor", "two-ranks"],
        }
        for part, steps in parts.items():
            # Without time, each step is only named.
            said = self.start(part, SECS="0").communicate()[1].splitlines()
            self.assertEqual([line.split(": ")[1] for line in said if ": no time, " in line], steps)

    def test_check_without_sanitizer(self):
        (self.place / "bin/compute-sanitizer").unlink()
        code, _, table = self.run_part("check", "memcheck", "selftest")
        self.assertEqual(code, 0, table)
        self.assertIn("skipped: compute-sanitizer", table)

    def test_a_failure_is_recorded_and_the_rest_goes_on(self):
        code, found, table = self.run_part("check", FAKE_FAILS="--selftest")
        self.assertEqual(code, 1)
        self.assertEqual([name for name, step in found["parts"].items() if not step["ok"]], ["selftest", "memcheck", "racecheck"])
        self.assertTrue(found["parts"]["doctor"]["ok"])
        self.assertIn("FAILED: exit code 1", table)

    def test_a_hanging_step_is_stopped(self):
        code, found, table = self.run_part("check", FAKE_HANG="--selftest", SECS="13")
        self.assertEqual(code, 1)
        self.assertEqual(found["parts"]["selftest"]["exit_code"], 124)
        self.assertIn("FAILED: stopped at its time limit", table)
        self.assertIn("FAILED: the 13 s of the part were used up; run it alone", table)

    def test_stopped_from_outside_it_tells_what_it_has(self):
        process = self.start("check", FAKE_HANG="--selftest")
        time.sleep(3)
        process.send_signal(signal.SIGTERM)
        process.communicate()
        self.assertEqual(process.returncode, 143)
        found = json.loads((self.place / "out/check.json").read_text())
        self.assertTrue(found["parts"]["doctor"]["ok"])

    def test_kernels(self):
        code, found, table = self.run_part("kernels", "ops", "ops-8k")
        self.assertEqual(code, 0, table)
        verdicts = {name.removesuffix(", bf16"): verdict for name, verdict in self.verdicts(found).items()}
        heads = "rows of {}, 32/8 heads of 128, causal"
        expected = {
            "share of the copy rate: dequantize, 12288x4096, nf4": "target",
            "share of the copy rate: rms_norm, 4096x4096": "must",
            "share of the copy rate: adamw, 50331648": "MISSED",
            "attention forward, 2k tokens: attention, 4096, " + heads.format(2048): "must",
            "attention backward, 2k tokens: attention_backward, 4096, " + heads.format(2048): "MISSED",
            "attention forward, 8k tokens: attention, 8192, " + heads.format(8192): "MISSED",
            "loss: rate: linear_cross_entropy, 8192, 4096 to 151936, frozen": "target",
            "loss: memory beside inputs: linear_cross_entropy, 8192, 4096 to 151936, frozen":
                "not in what the step printed",
            "golden trajectories, f32: largest relative difference of a loss": "not run",
        }
        self.assertEqual({name: verdicts.get(name) for name in expected}, expected)
        self.assertNotIn("share of the copy rate: weight_norm", table)
        self.assertIn("| target | expected (calculated, not measured) | verdict |", table)
        heads = heads.format(2048)
        self.assertIn(f"{heads}, bf16 | 210 TFLOP/s | ≥ 200 TFLOP/s | – | 180 to 230 TFLOP/s | must |", table)
        self.assertIn("| plain products | 780 TFLOP/s | – | – | 600 to 660 TFLOP/s | no bar |", table)
        # The bars of a frozen layer apply.
        others = [name for name in verdicts if name.startswith("loss: ") and not name.endswith("frozen")]
        self.assertEqual(others, [])
        self.assertIn("| dequantize | 12288x4096, nf4 | bf16 | 1.500 | 3870 GB/s | 90 % |", table)

    def test_the_fastest_algorithm_is_beside_the_one_of_a_run(self):
        code, found, table = self.run_part("kernels", "algorithms")
        self.assertEqual(code, 0, table)
        self.assertIn("| matmul | 4096x4096 to 12288 | bf16 | 1.500 (algorithm 3: 1.400) | 690 TFLOP/s | 100 % |", table)

    def test_golden_notices_other_losses(self):
        code, found, _ = self.run_part("kernels", "golden-f32")
        self.assertEqual(code, 1)
        runs = found["parts"]["golden-f32"]["result"]["runs"]
        self.assertEqual(len(runs), 8)
        self.assertTrue(all(not run["ok"] for run in runs))

    def test_train(self):
        code, found, table = self.run_part("train", "qlora-8b", "qlora-8b-peft", "lora-8b-peft")
        self.assertEqual(code, 0, table)
        both = found["parts"]["lora-8b-peft"]["result"]
        self.assertIsNone(both["summary"]["tokens_per_sec"]["peft"])
        self.assertAlmostEqual(both["summary_checkpointing"]["tokens_per_sec"]["ratio"], 2.5)
        verdicts = self.verdicts(found)
        expected = {"QLoRA 8B": "must", "QLoRA 8B: memory": "must", "LoRA 8B: tokens/s over PEFT's": "must",
                    "LoRA 8B: memory over PEFT's": "must", "LoRA 8B": "not run"}  # fmt: skip
        self.assertEqual({name: verdicts[name] for name in expected}, expected)
        self.assertIn("without checkpointing PEFT ran out of memory", table)
        self.assertIn("PEFT's side is LoRA over a bf16 base, not QLoRA", table)
        self.assertIn("| lora-8b-peft | 12,500 : – | 11 GB : – |", table)
        self.assertIn("| lora-8b-peft, both with checkpointing | 12,500 : 5,000 = 2.5 x | 11 GB : 44 GB = 0.25 x |", table)
        self.assertTrue((self.place / "out/trace/ops.json").is_file())
        # Once without checkpointing, once with it, for both rows.
        self.assertEqual(len(self.log.read_text().splitlines()), 2)

    def test_bars_are_those_of_the_card(self):
        code, found, table = self.run_part("train", "qlora-8b", "full-8b", FAKE_CARD="NVIDIA H100 80GB HBM3:81559")
        self.assertEqual(code, 0, table)
        self.assertEqual(self.verdicts(found)["QLoRA 8B"], "target")
        self.assertIn("skipped: needs a GPU of over 100 GB, this one has 81559 MiB", table)
        code, found, table = self.run_part("train", "qlora-8b", FAKE_CARD="NVIDIA L40S:46068")
        self.assertEqual(self.verdicts(found)["QLoRA 8B"], "no bar")

    def test_a_figure_far_from_its_expected_range(self):
        def cell(value):
            return bars.expected_cell({"value": value, "unit": "tokens/s", "expected": [9_500, 11_300]})

        for value in (None, 4_760, 22_500):
            self.assertEqual(cell(value), "9,500 to 11,300 tokens/s")
        self.assertEqual(cell(3_800), "9,500 to 11,300 tokens/s, off by 2.5x")
        self.assertEqual(cell(33_900), "9,500 to 11,300 tokens/s, off by 3.0x")

    def test_full_training_ends_with_its_steps(self):
        start = time.monotonic()
        code, found, table = self.run_part("train", "full-8b")
        self.assertEqual(code, 0, table)
        self.assertLess(time.monotonic() - start, 60)
        self.assertTrue(found["parts"]["full-8b"]["result"]["ours"][0]["ended_after_its_steps"])
        self.assertEqual(self.verdicts(found)["full 8B, 8-bit states"], "target")

    def test_ranks(self):
        code, found, table = self.run_part("ranks", SECS="12")
        self.assertEqual(code, 1)
        self.assertIn("two-ranks", found["parts"])
        self.assertIn("FAILED", table)

    def test_two_ranks_that_take_too_long(self):
        def late(count):
            sleep = [sys.executable, "-c", "import time; time.sleep(100)"]
            return two_ranks.finished([two_ranks.start(sleep, {}) for _ in range(count)], 0.1)

        self.assertIn("take turns on one GPU", late(2)[0])
        self.assertEqual(late(1)[0], "not done after 0 s")


if __name__ == "__main__":
    unittest.main()

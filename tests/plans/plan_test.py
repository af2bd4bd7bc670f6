"""`titanium plan` for clusters that are not there: plan_test.py TITANIUM SOURCE"""

import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import unittest

TITANIUM, SOURCE = sys.argv[1:3]
MODEL = os.path.join(SOURCE, "tests/data/models/qwen3_tied")
DEEP = {"num_hidden_layers": 32}
HARDWARE = """[compute]
matmul = 1e12
matmul_backward = 9e11
attention = 5e11
attention_backward = 4e11
head = 8e11
[memory]
update = 1e10
copy = 2e10
[links]
bandwidth = 3e9
latency = 2e-5
"""


class Plan(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = folder.name
        cls.run_file = cls.write("run.toml", f'[model]\npath = "{cls.folder}/model"\n[data]\npath = "none"\n[training]\nseq_len = 64\n'
                                 "max_tokens_per_microbatch = 128\nglobal_batch_size = 16\n")
        cls.hardware = cls.write("hardware.toml", HARDWARE)
        os.mkdir(os.path.join(cls.folder, "model"))
        with open(os.path.join(MODEL, "config.json")) as config:
            deep = {**json.load(config), **DEEP}
        deep.pop("layer_types", None)
        cls.write("model/config.json", json.dumps(deep))

    @classmethod
    def write(cls, name, text):
        path = os.path.join(cls.folder, name)
        with open(path, "w") as file:
            file.write(text)
        return path

    def plan(self, *arguments, fails=False, run_file=None):
        done = subprocess.run([TITANIUM, "plan", run_file or self.run_file, *arguments], capture_output=True, text=True)
        self.assertEqual(done.returncode != 0, fails, done.stderr)
        return done.stderr if fails else done.stdout

    def test_4096_ranks_are_planned_and_checked_in_two_seconds(self):
        big = ("--world-size=4096", "--parallelism.pipeline_parallel_degree=16", "--parallelism.tensor_parallel_degree=2",
               "--parallelism.data_parallel_replicate_degree=4", "--micro-batches=64")  # fmt: skip
        begin = time.monotonic()
        text = self.plan(*big, "--rank=4000")
        self.assertLess(time.monotonic() - begin, 2)
        self.assertIn("# rank 4000 of 4096 (pp 15, dp_replicate 2, dp_shard 16, tp 0)", text)
        self.assertIn("# pipeline: 1F1B, 16 stages: embedding, layer", text)
        self.assertIn("# bubble 19.0 %", text)  # 15 / (64 + 15)
        self.assertIn("send_input_grad", text)
        self.assertRegex(text, r"bytes into the rank a step: dp_shard [1-9].*dp_replicate [1-9].*tp [1-9].*pp [1-9]")

    def test_a_plan_alone_and_of_ranks(self):
        self.assertNotIn("bytes into", self.plan())
        self.assertIn("forward 33 keep", self.plan("--micro-batches=1"))
        both = [self.plan("--world-size=2", f"--rank={rank}", "--parallelism.pipeline_parallel_degree=2") for rank in (0, 1)]
        self.assertIn("recv_input", both[1])
        self.assertNotIn("recv_input", both[0])

    def memory(self, *arguments):
        text = self.plan("--world-size=2", "--quiet", *arguments)
        scale = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
        line = re.search(r"^# memory: (.*)", text, re.M)[1]
        return {kind: float(n) * scale[unit] for kind, n, unit in re.findall(r"([a-z][a-z ]*) ([0-9.]+) (\w+)(?:,|:|$)", line)}

    def test_memory_has_what_stays_between_uses(self):
        # A reshard keeps the bf16 casts of units that a rank has whole: under tensor parallelism all but the norms.
        tp = self.memory("--parallelism.tensor_parallel_degree=2")
        self.assertGreater(tp["cast weights"], 0.95 * tp["masters"] / 2)
        self.assertLess(tp["free buffers of units"], 0.05 * tp["masters"])
        # Of those that are gathered it gives back the memory, and the pool keeps it.
        fsdp = self.memory("--parallelism.data_parallel_shard_degree=2", "--micro-batches=1")
        self.assertLess(fsdp["cast weights"], 0.5 * fsdp["masters"])
        self.assertGreater(fsdp["free buffers of units"], 0)
        self.assertAlmostEqual(sum(n for kind, n in fsdp.items() if kind != "about"), fsdp["about"], delta=0.01 * fsdp["about"])

    def test_what_is_wrong_is_named(self):
        self.assertIn("rank 2 of 2: allowed: 0 to 1", self.plan("--world-size=2", "--rank=2", fails=True))
        self.assertIn("--simulate", self.plan("--html", "x.html", fails=True))
        self.assertRegex(self.plan("--world-size=6", "--parallelism.tensor_parallel_degree=4", fails=True), "world size|world_size|6 ranks|6")
        self.assertIn("nothing.toml: cannot be read", self.plan("--simulate", "nothing.toml", fails=True))
        wrong = self.write("wrong.toml", HARDWARE.replace("head = 8e11\n", ""))
        self.assertIn("compute.head: is missing", self.plan("--simulate", wrong, fails=True))

        self.assertTrue(self.plan("--world-size=8", "--parallelism.pipeline_parallel_degree=8", "--parallelism.pipeline_parallel_layers_per_stage=5",
                                  fails=True).startswith("titanium: BadConfig: pipeline_parallel_layers_per_stage = 5: 32 layers make 7 stages"))  # fmt: skip
        self.assertIn("1000000000", self.plan("--training.global_batch_size=1000000000", fails=True))
        done = subprocess.run([TITANIUM, "plan", self.run_file, "--parallelism.pipeline_parallel_schedule_csv=none.csv"], capture_output=True, text=True)
        self.assertIn("pipeline_parallel_schedule_csv = \"none.csv\" has no effect: parallelism.pipeline_parallel_degree is 1", done.stderr)

    def test_files_are_checked_before_any_work(self):
        simulated = ("--simulate", self.hardware)
        os.mkdir(os.path.join(self.folder, "a_folder"))
        os.mkfifo(os.path.join(self.folder, "a_pipe"))
        for flags in (("--html", *simulated), ("--trace", *simulated), ("--calibrate",)):
            for file, reason in (("none/x", "there is no folder"), ("a_folder", "not a regular file"), ("a_pipe", "not a regular file"), (self.run_file, "also given")):
                path = os.path.join(self.folder, file)
                begin = time.monotonic()
                self.assertRegex(self.plan(flags[0], path, *flags[1:], fails=True), f"BadConfig: {flags[0]} {re.escape(path)}: .*{reason}")
                self.assertLess(time.monotonic() - begin, 5)
        self.assertIn("--html", self.plan(*simulated, "--html", self.folder + "/one", "--trace", self.folder + "/./one", fails=True))
        self.assertIn("--trace", self.plan(*simulated, "--trace", self.hardware, fails=True))
        for other in (("--rank=0",), ("--world-size=1",), simulated, ("--quiet",), ("--micro-batches=2",)):
            self.assertRegex(self.plan("--calibrate", self.folder + "/measured", *other, fails=True), "--calibrate")

    def test_a_large_file_is_not_copied_for_every_rank(self):
        csv = self.write("long.csv", "\n".join(",".join(f"{s}F{m},{s}B{m}" for m in range(60000)) for s in (0, 1)))
        limit = lambda: resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))  # noqa: E731
        done = subprocess.run([TITANIUM, "plan", self.run_file, "--world-size=1000000", "--quiet", "--parallelism.pipeline_parallel_degree=2",
                               f"--parallelism.pipeline_parallel_schedule_csv={csv}"], capture_output=True, text=True, preexec_fn=limit)  # fmt: skip
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_a_name_that_is_not_utf8_is_drawn(self):
        name = os.fsencode(self.folder) + b"/\xff<script>.toml"
        shutil.copy(self.run_file, name)
        html, trace = (os.path.join(self.folder, name) for name in ("odd.html", "odd.json"))
        self.plan("--simulate", self.hardware, "--html", html, "--trace", trace, run_file=name)
        with open(html) as file:
            self.assertNotIn("<script>.toml", file.read())
        with open(trace) as file:
            json.load(file)

    def test_simulated_times_fit_the_trace_and_the_page(self):
        html, trace = (os.path.join(self.folder, name) for name in ("plan.html", "plan.json"))
        text = self.plan("--world-size=4", "--parallelism.pipeline_parallel_degree=4", "--parallelism.pipeline_parallel_schedule=InterleavedZeroBubble",
                         "--simulate", self.hardware, "--html", html, "--trace", trace)  # fmt: skip
        seconds = float(re.search(r"simulated: (\S+) s a step", text)[1])
        rows = [line.split() for line in text.splitlines() if re.match(r" +\d", line)]
        self.assertGreater(len(rows), 50)
        for row in rows:
            self.assertLessEqual(float(row[0]), float(row[1]))
            self.assertLessEqual(float(row[1]), seconds * 1.0001)
        with open(trace) as file:
            events = json.load(file)["traceEvents"]
        spans = [event for event in events if event["ph"] == "X"]
        self.assertAlmostEqual(max(event["ts"] + event["dur"] for event in spans) / 1e6, seconds, delta=1e-5 * seconds)
        self.assertEqual(len([event for event in spans if event["pid"] == 0]), len(rows))
        self.assertEqual({event["args"]["name"] for event in events if event["name"] == "process_name"}, {f"pp {r} (rank {r})" for r in range(4)})

        with open(html) as file:
            page = file.read()
        self.assertNotRegex(page, r"(src|href)=|https?://")  # it needs nothing else
        chromium = shutil.which("chromium")
        self.assertIsNotNone(chromium, "chromium is missing: run `make setup`")
        picture = os.path.join(self.folder, "plan.png")
        common = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", f"--user-data-dir={self.folder}/chromium"]
        shown = subprocess.run([*common, "--dump-dom", f"file://{html}"], capture_output=True, text=True, timeout=120)
        self.assertIn(f'data-drawn="{len(spans)}"', shown.stdout, shown.stderr)
        self.assertRegex(shown.stdout, r"s a step, \d+\.\d % of the ranks' time idle")
        subprocess.run([*common, f"--screenshot={picture}", "--window-size=1200,600", f"file://{html}"], capture_output=True, timeout=120, check=True)
        self.assertGreater(os.path.getsize(picture), 10_000)  # an empty page has a third of that

    def test_calibration_is_what_a_simulation_reads(self):
        measured = os.path.join(self.folder, "measured.toml")
        self.plan("--calibrate", measured)
        done = subprocess.run([TITANIUM, "launch", "-n", "2", "plan", self.run_file, "--calibrate", measured], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("simulated", self.plan("--world-size=2", "--simulate", measured, "--quiet"))
        done = subprocess.run([TITANIUM, "launch", "-n", "2", "plan", self.run_file], capture_output=True, text=True)
        self.assertIn("--world-size", done.stderr)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[3:]])

"""Whole runs on several ranks, one of which comes to grief: the others end in time and say which it was and what it did last; nothing is left
behind; the run resumes.

faults_test.py titanium titanium_faulty source_dir [all]   ("all": every fault at every place on several layouts, for the night)
"""

import itertools
import json
import os
import pathlib
import random
import re
import resource
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import time
import unittest

TITANIUM, FAULTY, SOURCE = (pathlib.Path(sys.argv.pop(1)).resolve() for _ in range(3))
ALL = sys.argv[1:2] == ["all"] and bool(sys.argv.pop(1))
MODEL = SOURCE / "tests/data/models/qwen3_tied"
STEPS = 8
TIMEOUT = 5  # comm.train_timeout_seconds where a rank stops answering; else a minute
STATUS = {"throw": 3, "exit": 7, "kill": 128 + 9, "stop": 5}
BAD_CONFIG, BAD_CHECKPOINT, RANK_LOST = 2, 4, 5
SLACK = 5  # seconds, of a busy machine
PATIENCE = 2  # of the launcher with ranks that have not ended by themselves


class Run:
    """A command under way: its lines with the second in which each came, its status in the end."""

    def __init__(self, command, cwd, **env):
        self.mark = f"{os.getpid()}-{random.getrandbits(64):x}"
        env = {**os.environ, "TITANIUM_TEST_MARK": self.mark, "OMP_NUM_THREADS": "1", **env}
        self.begin = time.monotonic()
        self.process = subprocess.Popen(command, cwd=cwd, env=env, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                        stderr=subprocess.STDOUT)
        self.lines = []
        self.reader = threading.Thread(target=self.read)
        self.reader.start()

    def read(self):
        for line in self.process.stdout:
            self.lines.append((time.monotonic() - self.begin, line.rstrip("\n")))
        self.seconds = time.monotonic() - self.begin

    def wait_until_quiet(self):
        """The ranks wait for one that has stopped."""
        while self.process.poll() is None and time.monotonic() - self.begin - (self.lines[-1][0] if self.lines else 2) < 1:
            time.sleep(0.05)

    def wait(self, timeout=120):
        try:
            self.status = self.process.wait(timeout)
        except subprocess.TimeoutExpired as error:
            self.process.kill()  # and the ranks with it
            self.process.wait()
            raise AssertionError(f"a hang:\n{self.text}") from error
        finally:
            self.reader.join()
            self.process.stdout.close()
        return self

    @property
    def text(self):
        return "\n".join(f"{at:6.2f} {line}" for at, line in self.lines)

    def processes(self):
        """Of this run, whoever started them."""
        found = []
        for entry in pathlib.Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and f"TITANIUM_TEST_MARK={self.mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:  # ended meanwhile, or another user's
                pass
        return found


def in_shared_memory():
    return {name for name in os.listdir("/dev/shm") if "titanium" in name}


class Faults(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        (self.folder / "tmp").mkdir()
        self.write_ids(self.folder / "ids.jsonl")

    @staticmethod
    def write_ids(path, seed=7):
        draw = random.Random(seed)
        with open(path, "w", encoding="utf-8") as file:
            for _ in range(120):
                ids = [draw.randrange(320) for _ in range(draw.randrange(3, 33))]
                file.write(json.dumps({"input_ids": ids}) + "\n")

    def keys(self, name, *more):
        return ["train", f"--model.path={MODEL}", "--data.path=ids.jsonl", "--training.seq_len=64", "--training.global_batch_size=12",
                "--training.max_tokens_per_microbatch=80", f"--training.steps={STEPS}", "--training.threads=1",
                "--training.mixed_precision_param=float32", "--checkpoint.export_dtype=float32", "--optimizer.lr=1e-3",
                "--checkpoint.interval=2", "--validator.enable=false", "--comm.train_timeout_seconds=60", f"--dump_folder={name}", *more]

    def start(self, ranks, keys, program=None, **env):
        return Run([program or TITANIUM, "launch", "-n", str(ranks), *keys], self.folder, TMPDIR=str(self.folder / "tmp"), **env)

    def check(self, run, status):
        self.assertEqual(run.status, status, run.text)
        self.assertEqual(run.processes(), [], run.text)
        self.assertEqual(os.listdir(self.folder / "tmp"), [], run.text)
        self.assertEqual(in_shared_memory() - self.shared_memory, set(), run.text)
        return run

    @classmethod
    def setUpClass(cls):
        cls.shared_memory = in_shared_memory()

    def steps_of(self, name):
        """The checkpoints that are complete."""
        return sorted(int(path.parent.name[5:]) for path in (self.folder / name / "checkpoint").glob("step-*/COMPLETE")
                      if path.parent.name[5:].isdigit())

    def weights_of(self, name):
        return (self.folder / name / "hf/model.safetensors").read_bytes()

    def metrics_of(self, name):
        lines = (self.folder / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [(line["step"], line["loss"], line["grad_norm"]) for line in map(json.loads, lines) if "loss" in line]


class OneRank(Faults):
    """comes to grief."""

    PLACES = {  # step, where
        "starting": (0, "start"),
        "loading": (0, "loading weights"),
        "reading": (0, "reading the data"),
        "forward": (5, "forward"),
        "backward": (5, "backward"),
        "reduce": (5, "reduce"),
        "update": (5, "update"),
        "saving": (4, "saving"),
        "writing": (4, "write"),
        "exporting": (STEPS, "exporting"),
    }

    def start_fault(self, name, ranks, rank, how, place, *keys):
        step, where = self.PLACES[place]
        timeout = [f"--comm.train_timeout_seconds={TIMEOUT}"] if how == "stop" else []
        return self.start(ranks, self.keys(name, *timeout, *keys), FAULTY, TITANIUM_FAULT=f"{rank} {how} {step} {where}")

    def check_fault(self, run, ranks, rank, how, place, gloo):
        step, where = self.PLACES[place]
        if how == "throw" and place == "writing":  # a save that fails costs that save alone
            self.check(run, 0)
            self.assertIn(f"could not be saved: rank {rank}: it threw; training goes on", run.text)
            return
        self.check(run, STATUS[how])
        # The main thread trains while another one writes; over Gloo heartbeats are some time apart.
        did = r"step \d+, .+" if place == "writing" else rf"step {step}, .*{where}.*"
        if gloo:
            did = r"step \d+, .+|it had not begun to work|nothing is known of it"
        lost = re.compile(r"\[(\d+)\] titanium: RankLost: rank (\d+) (.*); (?:its last progress: |last at |)(.*)$")
        said = {}
        for at, line in run.lines:
            if match := lost.match(line):
                if how == "stop" and int(match[1]) == rank:  # woken, to be ended
                    continue
                said[int(match[1])] = at
                self.assertEqual(int(match[2]), rank, run.text)
                self.assertRegex(match[4], f"^({did})$", run.text)
                reason = {"throw": "failed: it threw", "stop": "did not come (to|within)|kept the others waiting|stopped answering"}.get(how, "ended (.crashed, )?or was killed")
                self.assertRegex(match[3], reason, run.text)
        self.assertEqual(set(said), set(range(ranks)) - {rank}, run.text)
        # The last to say so is as early as the rest.
        self.assertLess(max(said.values()) - min(said.values()), SLACK, run.text)
        if how == "stop":
            self.assertLess(run.seconds - max(said.values()), PATIENCE + SLACK, run.text)
        else:
            self.assertRegex(run.lines[-1][1], f"^titanium launch: rank {rank} (ended with status|was ended by signal)", run.text)
            self.assertLess(run.seconds - min(said.values()), SLACK, run.text)

    def run_all(self, cases):
        """Of (ranks, rank, how, place, keys).  Those that stop wait most of their time, which others use."""
        cases = [(f"{how}-{place}-{rank}of{ranks}-{i}", ranks, rank, how, place, keys)
                 for i, (ranks, rank, how, place, keys) in enumerate(cases)]
        stopped = {}
        for case in cases:
            if case[3] == "stop":
                stopped[case] = run = self.start_fault(*case[:5], *case[5])
                run.wait_until_quiet()
        for case in sorted(cases, key=lambda case: case in stopped):
            with self.subTest(case[0]):
                run = stopped.get(case) or self.start_fault(*case[:5], *case[5])
                self.check_fault(run.wait(), *case[1:5], "--comm.transport=gloo" in case[5])
        return [name for name, *_ in cases]

    def check_resumes(self, name, ranks, *keys):
        """As the straight run, bitwise."""
        before = self.steps_of(name)
        run = self.check(self.start(ranks, self.keys(name, *keys)).wait(), 0)
        if before:
            self.assertIn(f"resumed after {before[-1]} updates", run.text)
        self.assertEqual(self.weights_of(name), self.weights_of("straight"), run.text)
        self.assertEqual(self.metrics_of(name), self.metrics_of("straight"), run.text)
        self.assertEqual([p.name for p in (self.folder / name).glob("checkpoint/*.partial")], [])

    def test_ends_all_wherever_it_is(self):
        self.check(self.start(2, self.keys("straight")).wait(), 0)
        one = [(2, 1, how, place, ()) for how, place in (("kill", "starting"), ("exit", "loading"), ("throw", "reading"), ("throw", "forward"), ("exit", "reduce"),
                                                         ("kill", "saving"), ("throw", "writing"), ("kill", "exporting"))]
        zero = [(2, 0, how, place, ()) for how, place in (("throw", "update"), ("kill", "writing"), ("exit", "forward"), ("stop", "loading"),
                                                          ("stop", "reduce"))]
        gloo = [(2, 1, how, place, ("--comm.transport=gloo",)) for how, place in (("kill", "forward"), ("throw", "update"), ("stop", "reduce"))]
        stop = [(2, 1, "stop", place, ()) for place in ("forward", "writing")]
        names = self.run_all(one + zero + gloo + stop)
        for name in names:
            if name.startswith(("kill-writing", "kill-exporting")):
                self.check_resumes(name, 2)

    def test_of_a_pipeline(self):
        """Whichever stage it is; and the run goes on without it, in one stage or on ranks with all of them."""
        pipeline = ("--parallelism.pipeline_parallel_degree=2",)
        zbv = (*pipeline, "--parallelism.pipeline_parallel_schedule=ZBVZeroBubble")
        fsdp = (*zbv, "--parallelism.data_parallel_shard_degree=2")
        self.check(self.start(2, self.keys("straight", *pipeline)).wait(), 0)
        names = self.run_all([(2, 1, "kill", "starting", pipeline), (2, 0, "kill", "loading", pipeline), (2, 1, "kill", "forward", pipeline),
                              (4, 2, "kill", "backward", fsdp), (2, 0, "kill", "saving", pipeline), (2, 1, "kill", "writing", pipeline),
                              (2, 0, "throw", "forward", zbv), (2, 1, "stop", "starting", pipeline), (2, 0, "stop", "loading", pipeline),
                              (2, 0, "stop", "forward", pipeline), (4, 1, "stop", "backward", fsdp), (2, 1, "stop", "writing", pipeline)])
        killed = next(name for name in names if name.startswith("kill-forward"))
        for name, ranks, keys in (("one", 1, ()), ("fsdp", 2, ()), ("zbv", 2, zbv)):
            with self.subTest(name):
                shutil.copytree(self.folder / killed, self.folder / name)
                self.check_goes_on(name, ranks, *keys)
        self.check_resumes(killed, 2, *pipeline)

    def check_goes_on(self, name, ranks, *keys):
        """On other ranks than the straight run: its losses, but for rounding."""
        before = self.steps_of(name)
        run = self.check(self.start(ranks, self.keys(name, *keys)).wait(), 0)
        self.assertIn(f"resumed after {before[-1]} updates", run.text)
        got, want = self.metrics_of(name), self.metrics_of("straight")
        self.assertEqual([step for step, *_ in got], [step for step, *_ in want])
        for (_, *numbers), (_, *wanted) in zip(got, want):
            for number, value in zip(numbers, wanted):
                self.assertLess(abs(number - value), 1e-5 * value)

    @unittest.skipUnless(ALL, "for the night")
    def test_every_fault_everywhere(self):
        layouts = [(4, ["--parallelism.data_parallel_shard_degree=4"]), (2, ["--parallelism.tensor_parallel_degree=2"]),
                   (3, ["--parallelism.data_parallel_shard_degree=3", "--comm.transport=gloo"]),
                   (4, ["--parallelism.data_parallel_replicate_degree=2", "--parallelism.tensor_parallel_degree=2",
                        "--training.mixed_precision_param=bfloat16", "--optimizer.state_dtype=bfloat16"]),
                   (2, ["--parallelism.pipeline_parallel_degree=2"]),
                   (4, ["--parallelism.pipeline_parallel_degree=2", "--parallelism.pipeline_parallel_schedule=ZBVZeroBubble"])]
        for ranks, keys in layouts:
            shutil.rmtree(self.folder / "straight", ignore_errors=True)
            self.check(self.start(ranks, self.keys("straight", *keys)).wait(), 0)
            writers = ranks // 2 if any("replicate" in key for key in keys) else ranks  # one copy writes
            cases = [(ranks, i % (writers if place == "writing" else ranks), how, place, tuple(keys))
                     for i, (how, place) in enumerate(itertools.product(STATUS, self.PLACES))]
            for name in self.run_all(cases):
                with self.subTest(name):
                    self.check_resumes(name, ranks, *keys)
                shutil.rmtree(self.folder / name)

    def test_that_never_comes(self):
        runs = {how: self.start(3, self.keys(how, f"--comm.init_timeout_seconds={TIMEOUT}"), FAULTY, TITANIUM_FAULT=f"1 {how} -1 main")
                for how in ("exit", "kill", "stop")}
        for how, run in runs.items():
            with self.subTest(how):
                self.check(run.wait(), STATUS[how])
                self.assertLess(run.seconds, TIMEOUT + PATIENCE + SLACK, run.text)
                if how == "stop":
                    for other in (0, 2):
                        self.assertIn(f"[{other}] titanium: RankLost: rank 1 did not come within {TIMEOUT} s (comm.init_timeout_seconds)", run.text)
                else:
                    self.assertRegex(run.lines[-1][1], "^titanium launch: rank 1 (ended with status 7|was ended by signal 9)", run.text)


class ADiskThatIsFull(Faults):
    """on one rank."""

    def test_is_the_same_error_on_all_and_the_run_resumes(self):
        self.check(self.start(2, self.keys("straight")).wait(), 0)
        for mode in ("async", "disabled"):
            full = self.folder / f"full-{mode}"
            full.touch()
            keys = self.keys(mode, f"--checkpoint.async_mode={mode}", "--checkpoint.keep_latest_k=1")
            run = self.check(self.start(2, keys, FAULTY, TITANIUM_FAULT=f"1 full 5 {full}").wait(), BAD_CHECKPOINT)
            error = r"rank 1: .*/step-{}\.partial/[a-z_]+-00001\.safetensors.*: No space left on device"
            self.assertRegex(run.text, f"the checkpoint of step 6 could not be saved: {error.format(6)}; training goes on")
            for rank in (0, 1):
                self.assertRegex(run.text, rf"\[{rank}\] titanium: BadCheckpoint: {error.format(STEPS)}")
            # Nothing of it is left, the old one is, and the model of the whole run is not lost.
            [old] = self.steps_of(mode)
            self.assertIn(old, (2, 4) if mode == "async" else (4,))  # that of step 4 may be under way when there is no more room
            self.assertEqual(os.listdir(self.folder / mode / "checkpoint"), [f"step-{old}"])
            self.assertEqual(self.weights_of(mode), self.weights_of("straight"))
            full.unlink()
            shutil.rmtree(self.folder / mode / "hf")
            run = self.check(self.start(2, keys).wait(), 0)
            self.assertIn(f"resumed after {old} updates", run.text)
            self.assertEqual(self.weights_of(mode), self.weights_of("straight"))
            self.assertEqual(self.metrics_of(mode), self.metrics_of("straight"))
            self.assertEqual(self.steps_of(mode), [STEPS])

    def test_a_limit_on_files_ends_no_rank(self):
        limit = (20000, resource.RLIM_INFINITY)
        command = ["sh", "-c", f'[ "$RANK" = 0 ] || ulimit -S -f {limit[0] // 512}; exec "$0" "$@"', TITANIUM, *self.keys("limited")]
        env = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": str(20000 + os.getpid() % 9000)}
        runs = [Run(command, self.folder, RANK=str(rank), LOCAL_RANK=str(rank), **env) for rank in (0, 1)]
        for run in runs:
            self.check(run.wait(), BAD_CHECKPOINT)
            self.assertRegex(run.text, "BadCheckpoint: rank 1: .*File too large")


class WhatDiffersBetweenRanks(Faults):
    """is found at start."""

    def ranks(self, program=TITANIUM, keys=()):
        """Rank 1 runs another program, with other keys, in another folder."""
        env = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": str(20000 + os.getpid() % 9000)}
        return [Run([program if rank else TITANIUM, *self.keys("out", "--model.path=model", *(keys if rank else ()))], self.folder / f"host{rank}",
                    RANK=str(rank), LOCAL_RANK=str(rank), **env) for rank in (0, 1)]

    def setUp(self):
        super().setUp()
        for host in (0, 1):
            shutil.copytree(MODEL, self.folder / f"host{host}/model")
            shutil.copy(self.folder / "ids.jsonl", self.folder / f"host{host}")

    def check_refused(self, runs, *says):
        for run in runs:
            self.check(run.wait(), BAD_CONFIG)
            self.assertLess(run.seconds, 30)
            for words in says:
                self.assertRegex(run.text, words)
        self.assertFalse((self.folder / "host1/out").exists())

    def test_the_program(self):
        self.check_refused(self.ranks(program=FAULTY), "the program of rank 1 is not that of rank 0: 'build [0-9a-f]{40}' against 'build [0-9a-f]{40}'")

    def test_the_config(self):
        self.check_refused(self.ranks(keys=["--optimizer.lr=2e-3"]),
                           "the config of rank 1 is not that of rank 0: 'optimizer.lr = 0.002' against 'optimizer.lr = 0.001'")

    def test_the_data(self):
        path = self.folder / "host1/ids.jsonl"
        text = path.read_text(encoding="utf-8")
        last = text.rindex("]") - 1  # the last digit of the last record
        for other in (text.replace("\n", "\n\n", 1), text[:last] + str((int(text[last]) + 1) % 10) + text[last + 1 :]):
            path.write_text(other, encoding="utf-8")
            self.check_refused(self.ranks(), "the data files of rank 1 are not those of rank 0: .* bytes, 120 records")

    def test_the_models_config(self):
        path = self.folder / "host1/model/config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps({**config, "rms_norm_eps": 1e-3}), encoding="utf-8")
        self.check_refused(self.ranks(), "the model's config.json of rank 1 is not that of rank 0: .*rms_norm_eps.*0.001")

    def test_the_models_weights(self):
        path = self.folder / "host1/model/model.safetensors"
        data = bytearray(path.read_bytes())
        size = struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8 : 8 + size])
        data[8 + size + header["model.norm.weight"]["data_offsets"][0]] ^= 1
        path.write_bytes(data)
        self.check_refused(self.ranks(), "the content of the model's files of rank 1 is not that of rank 0: 'model.norm.weight ")


if __name__ == "__main__":
    unittest.main()

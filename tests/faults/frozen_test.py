"""model.freeze through `titanium train`: frozen weights stay to the bit, the others train, the run resumes.

frozen_test.py titanium source_dir
"""

import json
import os
import pathlib
import random
import struct
import subprocess
import sys
import tempfile
import unittest

TITANIUM = sys.argv.pop(1)
SOURCE = pathlib.Path(sys.argv.pop(1))
MODEL = SOURCE / "tests/data/models/qwen3"
PATTERNS = ["model.embed_tokens.*", "*.q_proj.weight", "model.layers.?.input_layernorm.weight"]
CONFIG_STATUS = 2


def is_frozen(name):
    return name == "model.embed_tokens.weight" or name.endswith((".q_proj.weight", ".input_layernorm.weight"))


def tensors(path):
    """Name -> (dtype, bytes) of a safetensors file."""
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    begin = 8 + size
    return {n: (t["dtype"], data[begin + t["data_offsets"][0] : begin + t["data_offsets"][1]]) for n, t in header.items()}


class Frozen(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        draw = random.Random(7)
        with open(self.folder / "ids.jsonl", "w", encoding="utf-8") as file:
            for _ in range(60):
                ids = [draw.randrange(320) for _ in range(draw.randrange(3, 33))]
                file.write(json.dumps({"input_ids": ids}) + "\n")

    def train(self, name, *keys, status=0):
        """The run's log, after its exit status is checked."""
        command = [TITANIUM, "train", f"--model.path={MODEL}", f"--data.path={self.folder / 'ids.jsonl'}"]
        command += ["--training.seq_len=64", "--training.global_batch_size=6", "--training.max_tokens_per_microbatch=80"]
        command += ["--training.steps=6", "--training.threads=1", "--training.mixed_precision_param=float32"]
        command += ["--optimizer.lr=1e-3", "--lr_scheduler.total_steps=6", "--checkpoint.export_dtype=float32"]
        command += [f"--dump_folder={self.folder / name}", *keys]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        self.assertEqual(done.returncode, status, done.stderr)
        return done.stderr

    def checkpoint(self, name, step, state):
        folder = self.folder / name / "checkpoint" / f"step-{step}"
        return {n: t for file in folder.glob(f"{state}-*.safetensors") for n, t in tensors(file).items()}

    def steps(self, name):
        lines = (self.folder / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [line for line in map(json.loads, lines) if "loss" in line]

    def test_frozen_weights_stay_and_the_others_train(self):
        freeze = f"--model.freeze={','.join(PATTERNS)}"
        self.train("frozen", freeze)
        self.train("free")
        before = tensors(MODEL / "model.safetensors")
        after = tensors(self.folder / "frozen/hf/model.safetensors")
        self.assertEqual(after.keys(), before.keys())
        frozen = {n for n in before if is_frozen(n)}
        self.assertEqual(len(frozen), 5)  # of two layers
        masters = self.checkpoint("frozen", 6, "master")
        self.assertEqual(masters.keys(), before.keys())
        for name, (dtype, data) in before.items():
            self.assertEqual(dtype, "F32")
            for now in (after, masters):
                if name in frozen:
                    self.assertEqual(now[name], (dtype, data), f"{name} was frozen and has changed")
                else:
                    self.assertNotEqual(now[name], (dtype, data), f"{name} has not trained")
        for name, (_, data) in tensors(self.folder / "free/hf/model.safetensors").items():
            self.assertNotEqual(data, before[name][1], f"{name} does not train even when it is free")
        # No state of the optimizer, for them alone.
        for state in ("exp_avg", "exp_avg_sq"):
            self.assertEqual(self.checkpoint("frozen", 6, state).keys(), before.keys() - frozen)
            self.assertEqual(self.checkpoint("free", 6, state).keys(), before.keys())
        # The same loss at first; the norm is that of the others.
        first, free = self.steps("frozen")[0], self.steps("free")[0]
        self.assertEqual(first["loss"], free["loss"])
        self.assertLess(first["grad_norm"], free["grad_norm"])

    def test_a_resumed_run_is_bitwise_the_straight_one(self):
        freeze = f"--model.freeze={','.join(PATTERNS)}"
        self.train("straight", freeze)
        self.train("resumed", freeze, "--training.steps=3")
        self.assertIn("resumed", self.train("resumed", freeze))
        for state in ("master", "exp_avg", "exp_avg_sq"):
            self.assertEqual(self.checkpoint("resumed", 6, state), self.checkpoint("straight", 6, state))
        weights = [tensors(self.folder / name / "hf/model.safetensors") for name in ("resumed", "straight")]
        self.assertEqual(*weights)
        same = [[(s["step"], s["loss"], s["grad_norm"]) for s in self.steps(n)] for n in ("resumed", "straight")]
        self.assertEqual(*same)

    def test_the_command_line_and_the_file_say_the_same(self):
        file = self.folder / "run.toml"
        file.write_text(f"[model]\nfreeze = {json.dumps(PATTERNS)}\n", encoding="utf-8")
        printed = subprocess.run([TITANIUM, "train", str(file), f"--model.path={MODEL}", f"--data.path={self.folder}/ids.jsonl",
                                  "--print-config"], capture_output=True, text=True, timeout=60, check=True).stdout
        for pattern in PATTERNS:
            self.assertIn(f'"{pattern}"', printed)

    def test_what_cannot_be_is_refused(self):
        log = self.train("typo", "--model.freeze=*.q_proj.weight,lm_hed.weight", status=CONFIG_STATUS)
        self.assertIn("model.freeze = 'lm_hed.weight' fits no weight of the model; did you mean 'lm_head.weight'?", log)
        log = self.train("all", "--model.freeze=*", status=CONFIG_STATUS)
        self.assertIn("model.freeze: every weight is frozen, so there is nothing to train", log)
        for name in ("typo", "all"):
            folder = self.folder / name
            self.assertEqual(os.listdir(folder) if folder.exists() else [], [], "a refused run left something")


if __name__ == "__main__":
    unittest.main()

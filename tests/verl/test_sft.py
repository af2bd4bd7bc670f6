"""verl's SFT trainer, unmodified, on `titanium` and on verl's own fsdp2 (CPU, fp32): the same ten steps, of one process and of two."""

import json
import os
import subprocess
import sys
import tempfile
import time
import unittest

import tiny

STEPS = 10
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
# fsdp2 at fp32: its defaults compute in bf16.
FSDP2 = [
    "engine=fsdp",
    "engine.strategy=fsdp2",
    "engine.dtype=float32",
    "engine.use_torch_compile=False",
    "+engine.mixed_precision.param_dtype=fp32",
    "+engine.mixed_precision.reduce_dtype=fp32",
]
TITANIUM = ["hydra.searchpath=[pkg://titanium.verl.config]", "engine=titanium", "engine.dtype=float32"]


def train(folder, name, *overrides, engine_device=None, workers=1):
    """Runs the trainer; {step: metrics}.  engine_device: which registration of the engine verl takes."""
    log = os.path.join(folder, f"{name}.jsonl")
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("VERL_")},
        "VERL_USE_EXTERNAL_MODULES": "titanium.verl",
        "VERL_USE_EXTERNAL_PLUGINS": "none",
        "TITANIUM_VERL_CPU": "1",
        "VERL_FILE_LOGGER_PATH": log,
        "WORLD_SIZE": str(workers),
        "LOCAL_WORLD_SIZE": str(workers),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(tiny.free_port()),
        "HYDRA_FULL_ERROR": "1",
        "PYTHONWARNINGS": "ignore",
    }
    if engine_device:
        environment["VERL_ENGINE_DEVICE"] = engine_device
    command = [
        sys.executable,
        "-m",
        "verl.trainer.sft_trainer",
        f"data.train_files={folder}/train.parquet",
        f"data.val_files={folder}/val.parquet",
        "data.train_batch_size=8",
        "data.use_dynamic_bsz=True",
        "data.max_token_len_per_gpu=256",
        "data.max_length=256",
        "data.num_workers=0",
        f"model.path={folder}/model",
        "model.enable_gradient_checkpointing=False",
        "+model.override_config.attn_implementation=eager",
        "optim=fsdp",
        "optim.lr=1e-3",
        "optim.lr_warmup_steps=2",
        "optim.lr_scheduler_type=cosine",
        "optim.min_lr_ratio=0.1",
        "optim.clip_grad=0.5",
        "optim.weight_decay=0.1",
        f"trainer.total_training_steps={STEPS}",
        "trainer.total_epochs=1",
        "trainer.logger=[file]",
        "trainer.device=cpu",
        f"trainer.default_local_dir={folder}/{name}",
        "trainer.save_freq=5",
        "trainer.test_freq=5",
        f"hydra.run.dir={folder}/hydra",
        *overrides,
    ]
    running, outputs = [], []
    for rank in range(workers):
        outputs.append(open(os.path.join(folder, f"{name}.{rank}.log"), "w+"))
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        running.append(
            subprocess.Popen(command, cwd=folder, env={**environment, **place}, stdout=outputs[-1], stderr=subprocess.STDOUT)
        )
    while None in (ended := [worker.poll() for worker in running]):
        if any(ended):  # the others wait for one that has failed
            time.sleep(10)
            for worker in running:
                worker.kill()
        time.sleep(0.1)
    for rank, output in enumerate(outputs):
        with output:
            output.seek(0)
            if running[rank].returncode > 0:
                raise AssertionError(f"{name}: worker {rank} ended with {running[rank].returncode}:\n{output.read()[-6000:]}")
    if any(ended):
        raise AssertionError(f"{name}: the workers ended with {ended}")
    metrics = {}
    with open(log) as lines:
        for line in map(json.loads, lines):
            metrics.setdefault(line["step"], {}).update(line["data"])
    return metrics


class Sft(unittest.TestCase):
    maxDiff = None

    @classmethod
    def setUpClass(cls):
        cls.temporary = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.temporary.cleanup)
        cls.folder = tiny.make(cls.temporary.name)
        cls.fsdp2 = train(cls.folder, "fsdp2", *FSDP2, engine_device="cuda")
        cls.ours = train(cls.folder, "ours", *TITANIUM)

    def assert_same_steps(self, all_ours, all_theirs):
        self.assertEqual(sorted(all_ours), list(range(1, STEPS + 1)))
        self.assertEqual(sorted(all_theirs), sorted(all_ours))
        for step, theirs in all_theirs.items():
            ours = all_ours[step]
            for key, tolerance in (
                ("train/loss", 1e-4),
                ("train/grad_norm", 1e-3),
                ("train/lr", 1e-12),
                ("val/loss", 1e-4),
                ("train/global_tokens", 0),
            ):
                self.assertEqual(key in theirs, key in ours, f"{key} of step {step}")
                if key in theirs:
                    allowed = tolerance * abs(theirs[key])
                    self.assertLessEqual(abs(ours[key] - theirs[key]), allowed, f"{key} of step {step}: {ours[key]} {theirs[key]}")
        # It learned something, so that equal numbers say something.
        self.assertLess(all_ours[STEPS]["train/loss"], 0.9 * all_ours[1]["train/loss"])

    def assert_resumes(self, name, straight, *overrides, workers=1):
        """From its checkpoint of step 5 the run goes on as it did."""
        resumed = train(
            self.folder,
            f"{name}-resumed",
            *TITANIUM,
            *overrides,
            "trainer.resume_mode=resume_path",
            f"trainer.resume_from_path={self.folder}/{name}/global_step_5",
            workers=workers,
        )
        self.assertEqual(sorted(resumed), list(range(6, STEPS + 1)))
        for step, metrics in resumed.items():
            for key in ("train/loss", "train/grad_norm", "train/lr", "val/loss"):
                self.assertEqual(metrics.get(key), straight[step].get(key), f"{key} of step {step}")

    def test_ten_steps_are_those_of_fsdp2(self):
        self.assert_same_steps(self.ours, self.fsdp2)

    def test_a_resumed_run_repeats_the_straight_one(self):
        self.assert_resumes("ours", self.ours)

    def test_two_workers_are_two_of_fsdp2(self):
        theirs = train(self.folder, "fsdp2-two", *FSDP2, engine_device="cuda", workers=2)
        for name, layout in (("sharded", "engine.data_parallel_shard_size=2"), ("tensor-parallel", "engine.tensor_parallel_size=2"),
                             ("pipeline", "engine.pipeline_parallel_size=2")):
            with self.subTest(name):
                ours = train(self.folder, name, *TITANIUM, layout, workers=2)
                self.assert_same_steps(ours, theirs)
                for key in ("train/loss", "train/grad_norm", "val/loss"):  # the global batches are those of one worker
                    self.assertAlmostEqual(ours[STEPS][key], self.ours[STEPS][key], delta=1e-3 * self.ours[STEPS][key])
                self.assert_resumes(name, ours, layout, workers=2)

    def test_checkpoints_hold_what_verl_looks_for(self):
        for step in (5, 10):
            folder = os.path.join(self.folder, "ours", f"global_step_{step}")
            self.assertTrue(os.path.exists(os.path.join(folder, "data_0.pt")))
            self.assertTrue(os.path.exists(os.path.join(folder, "huggingface", "config.json")))
            self.assertTrue(os.path.exists(os.path.join(folder, "huggingface", "tokenizer.json")))
        with open(os.path.join(self.folder, "ours", "latest_checkpointed_iteration.txt")) as latest:
            self.assertEqual(latest.read().strip(), "10")


if __name__ == "__main__":
    unittest.main()

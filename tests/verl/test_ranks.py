"""verl's engine workers on titanium, two of them with a server each, against one: call for call the same numbers."""

import json
import os
import subprocess
import sys
import tempfile
import unittest
from functools import partial

import test_workers
import tiny
import torch
from verl.utils import tensordict_utils as tu
from verl.utils.distributed import initialize_global_process_group_ray
from verl.workers.config import ActorConfig
from verl.workers.utils.losses import ppo_loss, sft_loss

import titanium

LAYOUTS = {
    "sharded": {"data_parallel_shard_size": 2},
    "tensor-parallel": {"tensor_parallel_size": 2},
    "pipeline": {"pipeline_parallel_size": 2},
    "pipeline-v": {"pipeline_parallel_size": 2, "pipeline_parallel_schedule": "ZBVZeroBubble"},
}
ROWS = len(test_workers.LENGTHS)


def rows_of(engine):
    """Which rows of a batch this worker has, so that two mini-batches are the same for all layouts: their rows are dealt out."""
    rank, size = engine.get_data_parallel_rank(), engine.get_data_parallel_size()
    half = ROWS // 2
    share = half // size
    return [begin + share * rank + i for begin in (0, half) for i in range(share)]


def drive(folder, layout):
    """What one worker sees of every kind of call."""
    made = test_workers.worker(os.path.join(folder, "model"), "titanium", **layout)
    engine, seen = made.engine, {}
    rows = rows_of(engine)
    shows = engine.is_mp_src_rank_with_outputs()

    def batch(seed=0, **settings):
        whole = test_workers.batch(seed, **settings)
        return tu.index_select_tensor_dict(whole, rows) if engine.get_data_parallel_size() > 1 else whole

    def numbers(output):
        if not shows:
            return output
        metrics = test_workers.metrics_of(output)
        return {name: test_workers.values_of(metrics[name]) for name in ("loss", "grad_norm") if name in metrics}

    flags = dict(calculate_entropy=True, calculate_sum_pi_squared=True, compute_loss=False)
    output = made.infer_batch(batch(**flags))
    seen["statistics"] = output if not shows else {
        name: dict(zip(rows, tu.get(output, name).unbind())) for name in ("log_probs", "entropy", "sum_pi_squared")
    }  # fmt: skip

    made.set_loss_fn(partial(sft_loss, config=None))
    seen["infer"] = numbers(made.infer_batch(batch()))
    seen["sft"] = [numbers(made.train_batch(batch(seed, update_lr_scheduler=True))) for seed in (1, 2)]
    # As a callable of Python's, too.
    made.set_loss_fn(lambda **arguments: sft_loss(config=None, **arguments))
    seen["python"] = numbers(made.train_batch(batch(3)))

    for mode in ("token-mean", "seq-mean-token-sum"):
        actor = ActorConfig(
            strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=4, entropy_coeff=0.01, use_kl_loss=True, kl_loss_coef=0.05,
            loss_agg_mode=mode,
        )  # fmt: skip
        made.set_loss_fn(partial(ppo_loss, config=actor))
        data = batch(4, calculate_entropy=True, num_mini_batch=2, epochs=1, dataloader_kwargs={"shuffle": False})
        tu.assign_non_tensor(data, global_batch_size=ROWS // 2)
        seen[mode] = numbers(made.train_mini_batch(data))

    path = os.path.join(folder, f"checkpoints-{engine._client.world_size}-{'-'.join(layout)}", "global_step_1")
    made.set_loss_fn(partial(sft_loss, config=None))
    made.save_checkpoint(path, None, 1, 2)
    straight = numbers(made.train_batch(batch(5)))
    seen["weights"] = test_workers.weights_of(made)
    made.load_checkpoint(path)
    assert numbers(made.train_batch(batch(5))) == straight
    for name, tensor in test_workers.weights_of(made).items():
        assert torch.equal(tensor, seen["weights"][name]), name
    seen["after"] = straight

    # A loss that fails in one worker fails in all, and leaves an engine that works.
    before = numbers(made.infer_batch(batch()))
    last = engine.get_data_parallel_rank() == engine.get_data_parallel_size() - 1

    def failing(model_output, data, dp_group=None):
        if last:
            raise ZeroDivisionError("a loss of the user's own")
        return sft_loss(config=None, model_output=model_output, data=data, dp_group=dp_group)

    made.set_loss_fn(failing)
    try:
        made.train_batch(batch(6))
        seen["failure"] = None
    except Exception as error:
        seen["failure"] = f"{type(error).__name__}: {error}"
    made.set_loss_fn(partial(sft_loss, config=None))
    assert numbers(made.infer_batch(batch())) == before

    # What one worker gets wrong all refuse.
    bad = batch()
    if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
        bad["input_ids"].values()[3] = test_workers.VOCAB + 5
    try:
        made.infer_batch(bad)
        seen["refusal"] = None
    except titanium.TitaniumError as error:
        seen["refusal"] = f"{type(error).__name__}: {error}"
    assert numbers(made.infer_batch(batch())) == before
    engine._client.close()
    return seen


def main(folder, name, layout):
    initialize_global_process_group_ray()
    seen = drive(folder, json.loads(layout))
    torch.save(seen, os.path.join(folder, f"{name}.{os.environ['RANK']}.pt"))
    torch.distributed.barrier()


def run(folder, name, workers, layout):
    """What each worker has seen."""
    port = tiny.free_port()
    running = [
        subprocess.Popen(
            [sys.executable, __file__, folder, name, json.dumps(layout)],
            env={**os.environ, "TITANIUM_TEST_RANK": f"{rank} {workers} {port}"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(workers)
    ]  # fmt: skip
    outputs = [worker.communicate()[0] for worker in running]
    for worker, output in zip(running, outputs):
        if worker.returncode != 0:
            raise AssertionError(f"{name} ended with {worker.returncode}:\n{output[-6000:]}")
    return [torch.load(os.path.join(folder, f"{name}.{rank}.pt"), weights_only=False) for rank in range(workers)]


class Ranks(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        temporary = tempfile.TemporaryDirectory()
        cls.addClassCleanup(temporary.cleanup)
        cls.folder = tiny.make(temporary.name)
        (cls.alone,) = run(cls.folder, "alone", 1, {})

    def assert_near(self, ours, theirs, tolerance, what):
        ours, theirs = torch.as_tensor(ours).double(), torch.as_tensor(theirs).double()
        self.assertEqual(ours.shape, theirs.shape, what)
        self.assertLessEqual(((ours - theirs).abs() / (1 + theirs.abs())).max().item(), tolerance, what)

    def assert_same_numbers(self, ours, theirs, what):
        self.assertEqual(sorted(ours), sorted(theirs), what)
        for name in theirs:
            self.assert_near(ours[name], theirs[name], 1e-5, f"{what}: {name}")

    def test_two_workers_are_one(self):
        for name, layout in LAYOUTS.items():
            with self.subTest(name):
                seen = run(self.folder, name, 2, layout)
                shows = {"sharded": [0, 1], "pipeline": [1]}.get(name, [0])
                statistics = {key: {} for key in ("log_probs", "entropy", "sum_pi_squared")}
                for rank in shows:
                    for key, rows in seen[rank]["statistics"].items():
                        statistics[key].update(rows)
                for key, rows in self.alone["statistics"].items():
                    self.assertEqual(sorted(statistics[key]), sorted(rows), key)
                    for row, values in rows.items():
                        self.assert_near(statistics[key][row], values, 1e-5, f"{key} of row {row}")
                for rank, worker in enumerate(seen):
                    for what in ("infer", "python", "token-mean", "seq-mean-token-sum", "after"):
                        if rank in shows:
                            self.assert_same_numbers(worker[what], self.alone[what], what)
                        else:
                            self.assertIsNone(worker[what], what)
                    for step, theirs in enumerate(self.alone["sft"]):
                        if rank in shows:
                            self.assert_same_numbers(worker["sft"][step], theirs, f"sft {step}")
                    self.assertEqual(list(worker["weights"]), list(self.alone["weights"]))
                    for key, theirs in self.alone["weights"].items():
                        self.assertTrue(torch.equal(worker["weights"][key], seen[0]["weights"][key]), key)
                        self.assertLess((worker["weights"][key] - theirs).abs().mean().item(), 5e-6, key)
                    self.assertRegex(worker["refusal"], "BadData: rank 1: .*277" if name == "sharded" else "Bad(Data|Config): .*rank 1")
                asked = shows[-1]
                self.assertEqual(seen[asked]["failure"], "ZeroDivisionError: a loss of the user's own")
                self.assertRegex(seen[1 - asked]["failure"], f"BadData: rank {asked}: .*of the user's own")


if __name__ == "__main__":
    if len(sys.argv) == 4 and "TITANIUM_TEST_RANK" in os.environ:
        # test_workers, when it was imported, said that this is the only one.
        rank, size, port = os.environ["TITANIUM_TEST_RANK"].split()
        os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size, MASTER_PORT=port)
        main(*sys.argv[1:])
    else:
        unittest.main()

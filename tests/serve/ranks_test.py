"""N clients that drive N servers, which are the ranks of one engine: the results are those of one server."""

import concurrent.futures
import os
import tempfile
import unittest

import common
import numpy as np
import titanium

LENGTHS = (5, 9, 3, 7, 11, 4, 6, 8)
LAYOUTS = {
    "fsdp2": {"data_parallel_shard_size": 2},
    "ddp2": {"data_parallel_replicate_size": 2},
    "tp2": {"tensor_parallel_size": 2},
}


class Clients:
    """One client a rank, each in a thread of its own, as they wait for one another."""

    def __init__(self, cfgs, **options):
        self.pool = concurrent.futures.ThreadPoolExecutor(len(cfgs))
        port = common.free_port()
        self.engines = []
        self.engines = self.each(
            lambda rank: common.spawn(cfgs[rank], rank=rank, world_size=len(cfgs), local_rank=rank, local_world_size=len(cfgs), master_port=port, **options),
            range(len(cfgs)),
        )

    def each(self, function, arguments=None):
        """function(engine) of all at once, in rank order; the failure of the first that has one."""
        futures = [self.pool.submit(function, x) for x in (self.engines if arguments is None else arguments)]
        concurrent.futures.wait(futures)
        failures = [f.exception() for f in futures if f.exception() is not None]
        if failures:
            failures[0].all = failures
            raise failures[0]
        return [f.result() for f in futures]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for engine in self.engines:
            engine.close()
        self.pool.shutdown()


def parts(whole, count):
    """A batch, cut over `count` data ranks: rank r has the rows r, r + count, ..."""
    offsets = whole["offsets"]
    cut = []
    for rank in range(count):
        rows = range(rank, len(offsets) - 1, count)
        take = np.concatenate([np.arange(offsets[row], offsets[row + 1]) for row in rows])
        lengths = [offsets[row + 1] - offsets[row] for row in rows]
        part = {key: whole[key][take] for key in ("input_ids", "loss_mask")}
        cut.append({**part, "offsets": np.concatenate([[0], np.cumsum(lengths)])})
    return cut


def weights_of(engine):
    return {name: np.array(common.to_numpy(array)) for name, array in engine.get_per_tensor_param(dtype="float32").tensors()}


class Ranks(unittest.TestCase):
    def assert_same_weights(self, ours, theirs, tolerance):
        self.assertEqual(list(ours), list(theirs))
        for name in theirs:
            self.assertEqual(ours[name].shape, theirs[name].shape, name)
            # Steps of Adam are as large as the rate whatever the gradient; where it is nearly 0 only its sign counts.
            self.assertLessEqual(np.abs(ours[name] - theirs[name]).mean(), tolerance, name)

    def test_updates_are_those_of_one_server(self):
        whole = common.batch(LENGTHS)
        results, norms = [], []
        with common.spawn() as alone:
            alone.initialize()
            for _ in range(3):
                result = alone.train_batch(whole, "sft")
                results.append(sum(result["loss"]))
                norms.append(result["metrics"]["grad_norm"])
                alone.lr_scheduler_step()
            weights = weights_of(alone)
        self.assertLess(results[-1], results[0])
        for name, layout in LAYOUTS.items():
            data = 1 if "tp" in name else 2
            batches = parts(whole, data)
            with self.subTest(name), Clients([common.config(**layout)] * 2) as ranks:
                ranks.each(lambda engine: engine.initialize())
                self.assertEqual([engine.rank for engine in ranks.engines], [0, 1])
                self.assertEqual([engine.world_size for engine in ranks.engines], [2, 2])
                self.assertEqual([engine.get_data_parallel_rank() for engine in ranks.engines], [0, 1] if data == 2 else [0, 0])
                self.assertEqual([engine.is_mp_src_rank_with_outputs() for engine in ranks.engines], [True, data == 2])
                for step in range(3):
                    out = ranks.each(lambda engine: engine.train_batch(batches[engine.get_data_parallel_rank()], "sft"))
                    loss = sum(sum(result["loss"]) for result in out[:data])
                    self.assertAlmostEqual(loss, results[step], delta=2e-6)
                    for result in out:
                        self.assertAlmostEqual(result["metrics"]["grad_norm"], norms[step], delta=1e-5 * norms[step])
                    ranks.each(lambda engine: engine.lr_scheduler_step())
                for ours in ranks.each(weights_of):
                    self.assert_same_weights(ours, weights, 2e-6)


if __name__ == "__main__":
    unittest.main()

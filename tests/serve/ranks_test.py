"""N clients that drive N servers, which are the ranks of one engine: the results are those of one server."""

import concurrent.futures
import os
import re
import tempfile
import time
import unittest

import common
import numpy as np
import titanium

LENGTHS = (5, 9, 3, 7, 11, 4, 6, 8)
LAYOUTS = {
    "fsdp2": {"data_parallel_shard_size": 2},
    "ddp2": {"data_parallel_replicate_size": 2},
    "tp2": {"tensor_parallel_size": 2},
    "pp2": {"pipeline_parallel_size": 2},
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
            data = 1 if name in ("tp2", "pp2") else 2
            batches = parts(whole, data)
            with self.subTest(name), Clients([common.config(**layout)] * 2) as ranks:
                ranks.each(lambda engine: engine.initialize())
                self.assertEqual([engine.rank for engine in ranks.engines], [0, 1])
                self.assertEqual([engine.world_size for engine in ranks.engines], [2, 2])
                self.assertEqual([engine.get_data_parallel_rank() for engine in ranks.engines], [0, 1] if data == 2 else [0, 0])
                self.assertEqual([engine.is_mp_src_rank_with_outputs() for engine in ranks.engines], [name != "pp2", name != "tp2"])
                for step in range(3):
                    out = ranks.each(lambda engine: engine.train_batch(batches[engine.get_data_parallel_rank()], "sft"))
                    loss = sum(sum(result["loss"]) for result in out[:data])
                    self.assertAlmostEqual(loss, results[step], delta=2e-6)
                    for result in out:
                        self.assertAlmostEqual(result["metrics"]["grad_norm"], norms[step], delta=1e-5 * norms[step])
                    ranks.each(lambda engine: engine.lr_scheduler_step())
                for ours in ranks.each(weights_of):
                    self.assert_same_weights(ours, weights, 2e-6)

    def test_a_loss_of_the_clients_own_is_asked_where_outputs_are(self):
        whole = common.batch(LENGTHS, micro={"sequences": 1}, calculate_entropy=True)
        with common.spawn() as alone:
            alone.initialize()
            expected = alone.train_batch(whole, common.sft_loss(whole))
        for asked, layout in enumerate(({"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2})):
            with self.subTest(layout), Clients([common.config(**layout)] * 2) as ranks:
                self.assert_one_is_asked(ranks, asked, whole, expected)

    def assert_one_is_asked(self, ranks, asked, whole, expected):
        ranks.each(lambda engine: engine.initialize())
        seen = {engine.rank: [] for engine in ranks.engines}
        out = ranks.each(lambda engine: engine.train_batch(whole, common.sft_loss(whole, seen[engine.rank])))
        self.assertEqual([len(seen[asked]), len(seen[1 - asked])], [len(LENGTHS), 0])
        for result in out:
            self.assertAlmostEqual(sum(result["loss"]), sum(expected["loss"]), delta=1e-5)
            self.assertAlmostEqual(result["metrics"]["grad_norm"], expected["metrics"]["grad_norm"], delta=1e-4)
            self.assertEqual(result["metrics"]["tokens"], expected["metrics"]["tokens"])

        def broken(i, stats):
            raise ZeroDivisionError("mine")

        with self.assertRaisesRegex((ZeroDivisionError, titanium.BadData), "mine") as caught:
            ranks.each(lambda engine: engine.train_batch(whole, broken))
        (told,) = [error for error in caught.exception.all if not isinstance(error, ZeroDivisionError)]
        self.assertIsInstance(told, titanium.BadData)
        self.assertRegex(str(told), f"rank {asked}: .*mine")
        again = ranks.each(lambda engine: engine.infer_batch(whole, "sft"))
        self.assertEqual(again[0]["loss"], again[1]["loss"])

    def test_micro_batches_may_differ_in_number(self):
        whole = common.batch(LENGTHS)
        batches = parts(whole, 2)
        with common.spawn() as alone:
            alone.initialize()
            expected = alone.train_batch(whole, "sft")
        for loss in ("sft", None):
            with Clients([common.config(data_parallel_shard_size=2)] * 2) as ranks:
                ranks.each(lambda engine: engine.initialize())

                def step(engine):
                    given = [[0, 1, 2, 3]] if engine.rank == 0 else [[0], [1, 2], [3]]
                    batch = {**batches[engine.rank], "micro": {"given": given}}
                    own = common.sft_loss(batch, tokens=common.trained_tokens(whole)) if loss is None else loss
                    return engine.train_batch(batch, own)

                out = ranks.each(step)
                self.assertAlmostEqual(sum(sum(result["loss"]) for result in out), sum(expected["loss"]), delta=1e-5)
                for result in out:
                    self.assertAlmostEqual(result["metrics"]["grad_norm"], expected["metrics"]["grad_norm"], delta=1e-4)

    def test_a_checkpoint_of_two_is_read_by_one_and_back(self):
        batch = common.batch(LENGTHS)
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "global_step_1")
            with Clients([common.config(data_parallel_shard_size=2)] * 2) as ranks:
                ranks.each(lambda engine: engine.initialize())
                cut = parts(batch, 2)
                ranks.each(lambda engine: engine.train_batch(cut[engine.rank], "sft"))
                ranks.each(lambda engine: engine.save_checkpoint(path, 1))
                weights = ranks.each(weights_of)
            with common.spawn() as alone:
                alone.initialize()
                alone.load_checkpoint(path)
                self.assert_same_weights(weights_of(alone), weights[0], 0)
                straight = alone.train_batch(batch, "sft")["loss"]
            for layout in ({"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}):
                with self.subTest(layout), Clients([common.config(**layout)] * 2) as ranks:
                    ranks.each(lambda engine: engine.initialize())
                    ranks.each(lambda engine: engine.load_checkpoint(path))
                    for ours in ranks.each(weights_of):
                        self.assert_same_weights(ours, weights[0], 0)
                    for result in ranks.each(lambda engine: engine.train_batch(batch, "sft")):
                        self.assertAlmostEqual(sum(result["loss"]), sum(straight), delta=2e-5)

    def test_what_one_rank_refuses_all_refuse(self):
        batches = parts(common.batch(LENGTHS), 2)
        with Clients([common.config(data_parallel_shard_size=2)] * 2) as ranks:
            ranks.each(lambda engine: engine.initialize())
            before = ranks.each(lambda engine: engine.infer_batch(batches[engine.rank], "sft")["loss"])

            def all_refused(function, words, kind=titanium.TitaniumError):
                with self.assertRaisesRegex(kind, words) as caught:
                    ranks.each(function)
                self.assertEqual([str(error) for error in caught.exception.all], [str(caught.exception)] * 2)
                self.assertEqual(ranks.each(lambda engine: engine.infer_batch(batches[engine.rank], "sft")["loss"]), before)

            bad = {**batches[1], "input_ids": batches[1]["input_ids"] + 1000}
            all_refused(lambda engine: engine.infer_batch(bad if engine.rank == 1 else batches[0]), "rank 1: .*10", titanium.BadData)
            short = {**batches[1], "offsets": batches[1]["offsets"][:-1]}
            all_refused(lambda engine: engine.infer_batch(short if engine.rank == 1 else batches[0]), "rank 1: .*offsets", titanium.BadData)
            all_refused(
                lambda engine: engine.infer_batch(batches[0]) if engine.rank == 0 else engine.optimizer_step(),
                "the call of rank 1 is not that of rank 0: 'optimizer_step.*infer_batch", titanium.BadConfig,
            )  # fmt: skip
            all_refused(
                lambda engine: engine.train_batch(batches[engine.rank], {"name": "sft", "loss_agg_mode": ["token-mean", "seq-mean-token-sum"][engine.rank]}),
                "the call of rank 1 .*seq-mean-token-sum", titanium.BadConfig,
            )  # fmt: skip
            differs = "the call of rank 1 is not that of rank 0: "
            for option, words in (
                ({"dtype": "float32"}, differs + "'dtype = \"float32\"' against ''"),
                ({"dtype": "int8"}, differs + "'dtype = \"int8\"' against ''"),
                ({"color": "red"}, differs + "'color = \"red\"' against ''"),
                ({"bucket_bytes": -1}, differs + "'bucket_bytes = -1' against ''"),
                ({"keep_fp32": ["model.norm.weight"]}, differs + "'keep_fp32/0 = \"model.norm.weight\"' against ''"),
            ):
                all_refused(lambda engine: engine.get_per_tensor_param(**option if engine.rank == 1 else {}), re.escape(words), titanium.BadConfig)
            empty = ({}, [], None)  # are three things
            for one, other in ((0, 1), (1, 2), (2, 0)):
                all_refused(
                    lambda engine: engine._call("weights_begin", {"keep_fp32": empty[other] if engine.rank == 1 else empty[one]}),
                    differs + "'keep_fp32", titanium.BadConfig,
                )  # fmt: skip
            with self.assertRaisesRegex(titanium.BadConfig, "dtype is a type") as caught:  # on the client
                ranks.each(lambda engine: engine.get_per_tensor_param(**{"dtype": np.float32} if engine.rank == 0 else {}))
            self.assertEqual([type(error) for error in caught.exception.all], [titanium.BadConfig] * 2)
            self.assertRegex(str(caught.exception.all[1]), "rank 1 is not that of rank 0: .*weights_begin.dtype is a type")
            before = ranks.each(lambda engine: engine.infer_batch(batches[engine.rank], "sft")["loss"])
            with self.assertRaisesRegex(titanium.BadConfig, "param_groups.*rank 1"):
                ranks.engines[1].param_groups[0]["lr"] = 0.5
                ranks.each(lambda engine: engine.train_batch(batches[engine.rank], "sft"))
            with self.assertRaisesRegex(titanium.BadConfig, "comm differs"):
                ranks.each(lambda engine: engine.initialize({**common.config(data_parallel_shard_size=2), "comm": {"train_timeout_seconds": 7}}))

    def test_configs_that_differ_or_do_not_fit(self):
        two = common.config(data_parallel_shard_size=2)
        with self.assertRaisesRegex(titanium.BadConfig, "rank 1 is not that of rank 0.*seed"):
            Clients([two, common.config(data_parallel_shard_size=2, seed=7)])
        with self.assertRaisesRegex(titanium.BadConfig, "rank 1: .*seed_"):
            Clients([two, common.config(data_parallel_shard_size=2, seed_=7)])
        with self.assertRaisesRegex(titanium.BadConfig, "must be the world size, 2"):
            Clients([common.config()] * 2)
        with self.assertRaisesRegex(titanium.BadConfig, "comm.transport = .*local"):
            common.spawn({**two, "comm": {"transport": "pigeon"}})
        for wrong in ({"rank": 0}, {"rank": 0, "world_size": 2}, {"master_port": 5}, {"rank": "0", "world_size": 1}, {"rank": 0, "world_size": 1, "local_rank": 0}):
            with self.assertRaisesRegex(titanium.BadConfig, "spawn: "):
                common.spawn(two, **wrong)
        with self.assertRaisesRegex(titanium.BadConfig, "WORLD_SIZE"):
            common.spawn(two, env={"RANK": "0", "WORLD_SIZE": "", "OMP_NUM_THREADS": "1"})

    def test_over_gloo(self):
        cfg = {**common.config(data_parallel_shard_size=2), "comm": {"transport": "gloo"}}
        batches = parts(common.batch(LENGTHS), 2)
        losses = []
        for cfg in (cfg, common.config(data_parallel_shard_size=2)):
            with Clients([cfg] * 2) as ranks:
                ranks.each(lambda engine: engine.initialize())
                losses.append(ranks.each(lambda engine: engine.train_batch(batches[engine.rank], "sft")["loss"]))
                ranks.each(lambda engine: engine.close())
        self.assertEqual(*losses)

    def test_a_loss_that_takes_too_long_is_named(self):
        whole = common.batch(LENGTHS)
        for transport in ("local", "gloo"):
            for asked, layout in enumerate(({"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2})):
                cfg = {**common.config(**layout), "comm": {"transport": transport, "train_timeout_seconds": 1}}
                with self.subTest(transport, **layout), Clients([cfg] * 2) as ranks:
                    ranks.each(lambda engine: engine.initialize())
                    loss = common.sft_loss(whole)

                    def slow(i, stats):
                        time.sleep(4)
                        return loss(i, stats)

                    with self.assertRaises(titanium.RankLost) as caught:
                        ranks.each(lambda engine: engine.train_batch(whole, slow))
                    both = caught.exception.all  # the rank that was asked is told when its loss has come back
                    self.assertEqual([type(error) for error in both], [titanium.RankLost] * 2)
                    for error in both:
                        self.assertRegex(str(error), rf"rank {asked} .* 1 s \(comm\.train_timeout_seconds\)")
                    self.assertRegex(str(both[1 - asked]), "step 0, in the caller's loss")

    def test_a_client_that_closes_leaves_the_others_a_word(self):
        batches = parts(common.batch(LENGTHS), 2)
        with Clients([common.config(data_parallel_shard_size=2)] * 2) as ranks:
            ranks.each(lambda engine: engine.initialize())
            ranks.engines[1].close()
            with self.assertRaisesRegex(titanium.RankLost, "rank 1 left"):
                ranks.engines[0].train_batch(batches[0], "sft")


if __name__ == "__main__":
    unittest.main()

"""Every call of the Python client on a small model behind a real server."""

import os
import shutil
import tempfile
import unittest

import common
import numpy as np
import titanium
from common import batch, sft_loss, spawn, to_numpy
from titanium.receiver import Receiver


def weights(engine, **options):
    """All weights as (dtype name, bytes), in order."""
    options.setdefault("dtype", "master")
    return {name: to_numpy(array).copy() for name, array in engine.get_per_tensor_param(**options).tensors()}


def same(a, b):
    return list(a) == list(b) and all(a[name].tobytes() == b[name].tobytes() for name in a)


class Training(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.engine = spawn()
        cls.engine.initialize()
        cls.folder = tempfile.mkdtemp()
        cls.engine.save_checkpoint(os.path.join(cls.folder, "global_step_0"), 0)

    @classmethod
    def tearDownClass(cls):
        cls.engine.close()
        shutil.rmtree(cls.folder)

    def setUp(self):
        self.engine.load_checkpoint(os.path.join(self.folder, "global_step_0"))
        self.engine.optimizer_zero_grad()

    def test_python_loss_equals_the_built_in_one(self):
        engine, rows = self.engine, batch(micro={"sequences": 2})
        with engine.train_mode(zero_grad_on_exit=False):
            ours = engine.forward_backward_batch(rows, {"name": "sft"})
            norm = engine.optimizer_step()
        after = weights(engine)
        self.setUp()
        seen = []
        with engine.train_mode(zero_grad_on_exit=False):
            theirs = engine.forward_backward_batch(rows, sft_loss(rows, seen))
            self.assertAlmostEqual(engine.optimizer_step() / norm, 1, delta=1e-6)
        self.assertEqual(len(seen), 2, "asked once a micro-batch")
        self.assertEqual(sorted(row for stats in seen for row in stats.sample if row >= 0), [0, 1, 2, 3])
        self.assertGreater(norm, 0)
        np.testing.assert_allclose(theirs["loss"], ours["loss"], rtol=1e-6)
        self.assertEqual(ours["model_output"], {})
        self.assertEqual(theirs["metrics"]["answers"], 1.0)
        self.assertEqual(theirs["metrics"]["tokens"], 16.0)
        self.assertEqual(theirs["reports"]["answers"], {"sum": 2.0, "count": 2.0, "op": "mean"})
        for name, array in weights(engine).items():
            np.testing.assert_allclose(array, after[name], atol=2e-5, err_msg=name)

    def test_outputs_are_rows_in_input_order(self):
        engine = self.engine
        rows = batch(lengths=(4, 11, 2, 8, 6), calculate_entropy=True, calculate_sum_pi_squared=True, temperature=0.7)
        whole = engine.infer_batch({**rows, "micro": {"given": [[0, 1, 2, 3, 4]]}})["model_output"]
        cut = engine.infer_batch({**rows, "micro": {"given": [[3, 0], [4], [1, 2]]}})["model_output"]
        self.assertEqual(sorted(whole), ["entropy", "log_probs", "sum_pi_squared"])
        for name, jagged in whole.items():
            self.assertEqual([len(row) for row in jagged], [4, 11, 2, 8, 6])
            np.testing.assert_allclose(to_numpy(cut[name].values), to_numpy(jagged.values), atol=1e-5)
            self.assertEqual(float(jagged[1][-1]), 0.0)
            self.assertEqual(len(jagged[-1]), 6)
            with self.assertRaises(IndexError):
                jagged[5]
        self.assertTrue((to_numpy(whole["log_probs"].values) <= 0).all())
        per_row = engine.infer_batch({**rows, "temperature": [0.7] * 5})["model_output"]["log_probs"]
        np.testing.assert_allclose(to_numpy(per_row.values), to_numpy(whole["log_probs"].values), atol=1e-5)
        other = engine.infer_batch({**rows, "temperature": 1.0})["model_output"]["log_probs"]
        self.assertGreater(np.abs(to_numpy(other.values) - to_numpy(whole["log_probs"].values)).max(), 1e-3)
        one = engine.forward_step(rows)["model_output"]["log_probs"]
        np.testing.assert_allclose(to_numpy(one.values), to_numpy(whole["log_probs"].values), atol=1e-5)

    def test_gradients_accumulate_until_the_update(self):
        engine, rows = self.engine, batch()
        halves = [batch(micro={"given": [[0], [1], [2], [3]]})]
        with engine.train_mode():
            engine.forward_backward_batch(rows, "sft")
            whole = engine.optimizer_step()
        self.setUp()
        with engine.train_mode(zero_grad_on_exit=False):
            engine.forward_backward_batch(halves[0], "sft")
        with engine.train_mode(zero_grad_on_exit=False):
            engine.forward_backward_batch(halves[0], "sft")
        self.assertAlmostEqual(engine.optimizer_step() / (2 * whole), 1, delta=1e-5)
        engine.optimizer_zero_grad()
        self.assertEqual(engine.optimizer_step(), 0.0)

    def test_train_batch_learns(self):
        engine, rows = self.engine, batch()
        with engine.train_mode():
            results = [engine.train_batch(rows, {"name": "sft"}) for _ in range(4)]
        losses = [sum(r["loss"]) for r in results]
        self.assertEqual(losses, sorted(losses, reverse=True))
        self.assertGreater(results[0]["metrics"]["grad_norm"], 0)

    def test_a_policy_update_by_name(self):
        engine = self.engine
        rows = batch(calculate_entropy=True)
        old = engine.infer_batch(rows)["model_output"]["log_probs"]
        # Entry i of a column belongs to token i; outputs belong to the token after.
        shifted = np.zeros(len(rows["input_ids"]))
        shifted[1:] = to_numpy(old.values)[:-1]
        columns = {"old_log_probs": shifted, "advantages": np.linspace(-1, 1, len(shifted))}
        with engine.train_mode():
            result = engine.train_batch({**rows, "columns": columns}, {"name": "policy", "clip_ratio": 0.2})
        self.assertLess(abs(result["metrics"]["actor/ppo_kl"]), 1e-5)
        self.assertEqual(result["metrics"]["actor/pg_clipfrac"], 0.0)
        self.assertGreater(result["metrics"]["grad_norm"], 0)

    def test_modes_nest_and_an_exception_zeroes_gradients(self):
        engine, rows = self.engine, batch()
        self.assertIsNone(engine.mode)
        with engine.train_mode():
            with engine.eval_mode(disable_auto_offload=True):
                self.assertEqual(engine.mode, "eval")
            self.assertEqual(engine.mode, "train")
        self.assertIsNone(engine.mode)
        with self.assertRaises(KeyError):
            with engine.train_mode(zero_grad_on_exit=False):
                engine.forward_backward_batch(rows, "sft")
                raise KeyError("mine")
        self.assertIsNone(engine.mode)
        self.assertEqual(engine.optimizer_step(), 0.0)

    def test_writes_to_param_groups_reach_the_engine(self):
        engine, rows = self.engine, batch()
        (group,) = engine.optimizer.param_groups
        self.assertEqual(sorted(group), ["betas", "eps", "lr", "weight_decay"])
        self.assertIsInstance(group["lr"], float)
        self.assertIsInstance(group["betas"], tuple)
        before = weights(engine)
        group["lr"] = 0.0
        with engine.train_mode():
            engine.train_batch(rows, "sft")
        self.assertTrue(same(weights(engine), before), "a rate of 0 changes nothing")
        group["lr"] = 0.1
        with engine.train_mode():
            engine.train_batch(rows, "sft")
        self.assertFalse(same(weights(engine), before))
        self.assertAlmostEqual(engine.lr_scheduler_step(), 1e-2)
        self.assertAlmostEqual(group["lr"], 1e-2, msg="the schedule writes into the same dict")
        group["lr"] = -1.0
        with self.assertRaisesRegex(titanium.BadConfig, "lr"):
            engine.optimizer_step()
        group["lr"] = 1e-2
        engine.optimizer_step()

    def test_a_scope_ends_whatever_stands_in_param_groups(self):
        engine, rows = self.engine, batch()
        (group,) = engine.param_groups
        with self.assertRaisesRegex(titanium.BadConfig, "lr"):
            with engine.train_mode(zero_grad_on_exit=False):
                engine.forward_backward_batch(rows, "sft")
                group["lr"] = -1.0
                engine.optimizer_step()
        group["lr"] = 1e-2
        self.assertEqual(engine.optimizer_step(), 0.0, "an exception passed: gradients are zeroed")
        with self.assertRaisesRegex(titanium.BadConfig, "no mode"):
            engine._call("exit_mode")

    def test_weights_are_those_of_the_file(self):
        engine = self.engine
        file = common.read_safetensors(os.path.join(common.model(), "model.safetensors"))
        stream = engine.get_per_tensor_param(dtype="float32", bucket_bytes=100_000)
        self.assertIsNone(stream.adapter)
        names, count = [], 0
        for bucket in stream:
            count += 1
            for name, array in bucket.items():
                self.assertEqual(to_numpy(array).tobytes(), file[name][1], name)
                names.append(name)
        self.assertEqual(sorted(names), sorted(file))
        self.assertEqual(names, [spec[0] for spec in stream.specs])
        self.assertEqual(names[0], "model.embed_tokens.weight")
        self.assertEqual(count, stream.buckets)
        self.assertGreater(count, 2)
        self.assertEqual(len(stream.checksum), 16)
        self.assertEqual(list(stream.checksums), names)
        again = engine.get_per_tensor_param()
        self.assertEqual(again.version, stream.version + 1)
        again.close()
        again.close()
        self.assertEqual(list(again), [])

    def test_a_receiver_takes_the_stream(self):
        engine = self.engine
        with open(os.path.join(common.model(), "model.safetensors"), "rb") as file:
            original = file.read()
        exact = common.read_safetensors(os.path.join(common.model(), "model.safetensors"))
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "model.safetensors")
            with open(path, "wb") as file:  # the right layout, other weights
                size = 8 + int.from_bytes(original[:8], "little")
                file.write(original[:size] + bytes(len(original) - size))
            receiver = Receiver(folder, fsync=False)
            report = receiver.take_stream(engine.get_per_tensor_param(dtype="float32", bucket_bytes=100_000))
            self.assertEqual((report.updated, report.not_updated, report.unknown), (len(exact), [], []))
            self.assertEqual(common.read_safetensors(path), exact)
            self.assertEqual(receiver.version, report.version)
        arrays = {}
        Receiver(arrays, create=True, arrays=common.ARRAYS).take_stream(engine.get_per_tensor_param(dtype="float32"))
        self.assertEqual({name: to_numpy(array).tobytes() for name, array in arrays.items()}, {n: b for n, (_, b) in exact.items()})
        for array in arrays.values():
            array[...] = 7
        last = list(arrays)[-1]
        arrays[last] = arrays[last][1:]
        with self.assertRaisesRegex(titanium.BadData, last):  # known before the first is written
            Receiver(arrays).take_stream(engine.get_per_tensor_param(dtype="float32"))
        self.assertTrue(all(bool((array == 7).all()) for array in arrays.values()))
        engine.optimizer_step()  # the stream that was refused is closed

    def test_bfloat16(self):
        engine = self.engine
        file = common.read_safetensors(os.path.join(common.model(), "model.safetensors"))
        for name, array in engine.get_per_tensor_param(keep_fp32=["model.norm.weight"]).tensors():
            exact = np.frombuffer(file[name][1], np.float32)
            if name == "model.norm.weight":
                self.assertEqual(to_numpy(array).tobytes(), exact.tobytes())
                continue
            bits = to_numpy(array).reshape(-1)
            self.assertEqual(bits.dtype, np.uint16)
            back = (bits.astype(np.uint32) << 16).view(np.float32)
            np.testing.assert_allclose(back, exact, rtol=2**-8)

    def test_a_stream_that_is_left_does_not_stay_open(self):
        engine, rows = self.engine, batch()
        first = next(engine.get_per_tensor_param(bucket_bytes=50_000))
        held = engine.get_per_tensor_param(bucket_bytes=50_000)
        with engine.train_mode():
            engine.forward_backward_batch(rows, "sft")  # between two buckets
            with self.assertRaises(titanium.BadConfig):  # the weights stand still while it is open
                engine.optimizer_step()
            held.close()
            engine.optimizer_step()
        self.assertIn("model.embed_tokens.weight", first)

    def test_a_checkpoint_is_the_way_back(self):
        engine, rows = self.engine, batch()
        with engine.train_mode():
            engine.train_batch(rows, "sft")
        engine.param_groups[0]["lr"] = 5e-3
        path = os.path.join(self.folder, "global_step_1")
        engine.save_checkpoint(path, global_step=1, max_ckpt_to_keep=3)
        saved = weights(engine)
        with engine.train_mode():
            straight = engine.train_batch(rows, "sft")
        after = weights(engine)
        self.assertFalse(same(saved, after))
        engine.load_checkpoint(path)
        self.assertTrue(same(weights(engine), saved))
        with engine.train_mode():
            resumed = engine.train_batch(rows, "sft")
        self.assertEqual(resumed["loss"], straight["loss"])
        self.assertTrue(same(weights(engine), after), "bitwise")

    def test_refusals_leave_the_engine_alive(self):
        engine, rows = self.engine, batch()
        bad_ids = {**rows, "input_ids": rows["input_ids"].copy()}
        bad_ids["input_ids"][3] = 100_000
        large = batch(lengths=[500] * 800)  # over a mebibyte: in a memfd
        for wrong, kind, text in (
            (bad_ids, titanium.BadData, "100000"),
            ({**rows, "offsets": [0, 5, 3]}, titanium.BadData, "offsets"),
            ({**rows, "loss_mask": [1, 2]}, titanium.BadData, "loss_mask"),
            ({**rows, "loss_mask": rows["loss_mask"] + 1}, titanium.BadData, "loss_mask"),
            ({**rows, "input_ids": np.ones(24)}, titanium.BadData, "input_ids"),
            ({**rows, "temperature": 0.0}, titanium.BadData, "temperature"),
            ({**rows, "micro": {"given": [[0]]}}, titanium.TitaniumError, ""),
            ({**rows, "micro": {"rows": 1}}, titanium.BadData, "sequences"),
            ({**rows, "micro": 3}, titanium.BadData, "micro is 3"),
            ({**rows, "input_ids": [[1, 2], [3]]}, titanium.BadData, "rows go end to end"),
            ({**rows, "columns": {"x": [1.0]}}, titanium.BadData, "columns.x"),
            (large, titanium.BadData, "500"),
        ):
            with self.assertRaisesRegex(kind, text):
                engine.infer_batch(wrong)
        for loss, text in (
            ({"name": "nonsense"}, "sft"),
            ({"name": "sft", "clip": 1}, "clip"),
            ({"name": "policy", "policy_loss": {"loss_mode": 3}}, "loss_mode"),
            (None, "loss"),
        ):
            with self.assertRaisesRegex(titanium.BadConfig, text):
                engine.forward_backward_batch(rows, loss)
        pairs = {**rows, "group": [0, 0, 1, 1], "seq_columns": {"chosen": [1, 0, 1, 0]}}
        for wrong, loss in (({**rows, "columns": {"values": rows["loss_mask"], "returns": rows["loss_mask"]}}, "value"),
                            (pairs, "reward_model")):
            with self.assertRaisesRegex(titanium.BadConfig, "needs the values.* a value_model"):
                engine.train_batch(wrong, loss)
        with self.assertRaises(titanium.BadConfig):
            engine.train_batch(rows, None)
        with self.assertRaisesRegex(titanium.BadConfig, "unknown method 'sing'"):
            engine._call("sing")
        with self.assertRaisesRegex(titanium.BadConfig, "unknown argument 'loud'"):
            engine._call("optimizer_step", {"loud": True})
        with self.assertRaises(titanium.BadConfig):
            engine.to("nowhere")
        with self.assertRaises(titanium.BadConfig):
            engine.get_per_tensor_param(dtype="int8")
        with self.assertRaises(titanium.BadConfig):
            engine.get_per_tensor_param(color="red")
        with self.assertRaisesRegex(titanium.BadCheckpoint, "nowhere"):
            engine.load_checkpoint(os.path.join(self.folder, "nowhere"))
        with self.assertRaises(titanium.BadConfig):
            engine._call("exit_mode")
        self.assertEqual(len(engine.infer_batch(rows)["model_output"]["log_probs"]), 4)

    def test_a_loss_that_fails_is_the_callers_exception(self):
        engine, rows = self.engine, batch(micro={"sequences": 1})

        def third_time(i, stats):
            if i == 2:
                raise KeyError("mine")
            return sft_loss(rows)(i, stats)

        with self.assertRaisesRegex(KeyError, "mine"):
            engine.forward_backward_batch(rows, third_time)
        self.assertEqual(engine.optimizer_step(), 0.0, "half a sum of gradients is not kept")
        for answer, text in (
            (1.0, "dict"),
            ({"loss": 1.0, "gradient": {}}, "gradient"),
            ({"loss": 1.0, "gradients": {"logits": [1.0]}}, "logits"),
            ({"loss": 1.0, "gradients": {"log_probs": [1.0]}}, "log-probs"),
            ({"loss": 1.0, "gradients": {"entropy": [1.0]}}, "entropy"),
            ({"loss": 1.0, "metrics": {"x": {"sum": 1, "op": "median"}}}, "median"),
            ({"loss": 1.0, "metrics": {"x": np.ones(2)}}, "metric 'x'"),
        ):
            with self.assertRaisesRegex(titanium.BadData, text):
                engine.forward_backward_batch(rows, lambda i, stats: answer)
        with self.assertRaisesRegex(titanium.BadConfig, "inside a loss"):
            engine.forward_backward_batch(rows, lambda i, stats: engine.optimizer_step())
        engine.forward_backward_batch(rows, sft_loss(rows))
        with self.assertRaisesRegex(KeyboardInterrupt, "user"):  # reaches the caller too, and the engine lives

            def interrupted(i, stats):
                raise KeyboardInterrupt("user")

            engine.forward_backward_batch(rows, interrupted)
        engine.infer_batch(rows)

    def test_columns_for_results_and_statistics(self):
        """What moves by a token: results to columns, columns to the statistics of a micro-batch."""
        engine, rows = self.engine, batch(micro={"sequences": 2})
        rng, offsets = np.random.default_rng(3), rows["offsets"]
        weights = rng.normal(size=offsets[-1]) * rows["loss_mask"]
        old = engine.infer_batch(rows)["model_output"]["log_probs"]
        column = old.by_token()
        for row, moved in zip(old, column):
            np.testing.assert_array_equal(to_numpy(moved), np.r_[0, to_numpy(row)[:-1]])
        self.assertEqual(float(old[0][-1]), 0.0, "a copy")

        trained = [b + i for b, e in zip(offsets, offsets[1:]) for i in range(1, e - b) if rows["loss_mask"][b + i]]
        tokens = len(trained)

        def reinforce(i, stats):
            weight = stats.column(weights / tokens, offsets)
            self.assertTrue(np.array_equal(to_numpy(weight), to_numpy(stats.column(titanium.Jagged(weights / tokens, offsets)))))
            return {"loss": -float((weight * stats.log_probs).sum()), "gradients": {"log_probs": -weight}}

        columns = {"old_log_probs": column, "advantages": weights}
        with engine.train_mode():
            theirs = engine.train_batch(rows, reinforce)
        self.setUp()
        with engine.train_mode():
            built_in = engine.train_batch({**rows, "columns": columns}, {"name": "policy"})  # on policy: the same gradient
        self.assertAlmostEqual(theirs["metrics"]["grad_norm"] / built_in["metrics"]["grad_norm"], 1, delta=1e-6)
        self.assertAlmostEqual(built_in["metrics"]["actor/ppo_kl"], 0, delta=1e-6)
        expected = -sum(weights[t] * float(column.values[t]) for t in trained) / tokens
        self.assertAlmostEqual(sum(theirs["loss"]), expected, delta=1e-5)
        for call, text in (
            (lambda stats: stats.column(weights), "offsets of the batch are needed"),
            (lambda stats: stats.column(weights[1:], offsets), "23 values, but the offsets end at 24"),
        ):
            with self.assertRaisesRegex(titanium.BadData, text):
                engine.infer_batch(rows, lambda i, stats: call(stats))

    def test_values_that_are_not_finite_cross(self):
        rows = batch(micro={"given": [[0, 1, 2, 3]]})
        deviation = {"sum": 6.0, "count": 2, "spread": 8.0, "op": "std"}  # of 1 and 5
        answer = {"loss": float("nan"), "metrics": {"x": float("inf"), "std": deviation}}
        result = self.engine.infer_batch(rows, lambda i, stats: answer)
        self.assertEqual(result["metrics"]["std"], 2.0)
        self.assertEqual(result["reports"]["std"], deviation)
        self.assertNotEqual(result["loss"][0], result["loss"][0])
        self.assertEqual(result["metrics"]["x"], float("inf"))

    def test_to_and_adapters(self):
        self.engine.to("cpu")
        self.engine.to("cpu", model=True, optimizer=False, grad=False)
        with self.engine.disable_adapter():
            self.engine.infer_batch(batch())
        self.assertFalse(self.engine.is_param_offload_enabled)

    def test_nested_tensors_and_autograd(self):
        if common.ARRAYS != "torch":  # `make test-verl` runs this file with torch
            return
        import torch

        engine = self.engine
        rows = batch()
        ids, mask, offsets = (torch.as_tensor(rows[k]) for k in ("input_ids", "loss_mask", "offsets"))
        nested = torch.nested.nested_tensor_from_jagged(ids, offsets)
        ours = engine.infer_batch({"input_ids": nested})["model_output"]["log_probs"]
        self.assertTrue(torch.equal(ours.nested().offsets(), offsets))
        with self.assertRaisesRegex(titanium.BadData, "layout=torch.jagged"):
            engine.infer_batch({"input_ids": torch.nested.as_nested_tensor([ids[:2], ids[:3]], layout=torch.strided)})
        with self.assertRaisesRegex(titanium.BadData, "answered Tensor, expected"):
            engine.infer_batch(rows, titanium.autograd_loss(lambda i, stats: stats.log_probs.sum()))
        tokens = int(sum(mask[b + 1 : e].sum() for b, e in zip(offsets, offsets[1:])))

        def loss(i, stats):
            shifted = torch.zeros(len(stats.log_probs))
            for row, (b, e) in zip(stats.sample, zip(stats.offsets, stats.offsets[1:])):
                if row >= 0:
                    shifted[b : e - 1] = mask[offsets[row] + 1 : offsets[row + 1]].float()
            return -(stats.log_probs * shifted).sum() / tokens, {"seen": float(shifted.sum())}

        with engine.train_mode():
            theirs = engine.train_batch({"input_ids": nested, "loss_mask": mask}, titanium.autograd_loss(loss))
        self.setUp()
        with engine.train_mode():
            built_in = engine.train_batch(rows, "sft")
        self.assertAlmostEqual(sum(theirs["loss"]), sum(built_in["loss"]), delta=1e-6)
        self.assertAlmostEqual(theirs["metrics"]["grad_norm"] / built_in["metrics"]["grad_norm"], 1, delta=1e-6)


if __name__ == "__main__":
    unittest.main()

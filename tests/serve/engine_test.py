"""Every call of the Python client on a small model behind a real server."""

import os
import shutil
import subprocess
import tempfile
import threading
import unittest

import common
import numpy as np
import titanium
from common import batch, config, sft_loss, spawn, to_numpy


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

    def test_values_that_are_not_finite_cross(self):
        rows = batch(micro={"given": [[0, 1, 2, 3]]})
        answer = {"loss": float("nan"), "metrics": {"x": float("inf")}}
        result = self.engine.infer_batch(rows, lambda i, stats: answer)
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


class Engines(unittest.TestCase):
    def test_facts_answer_before_initialize(self):
        with spawn(config(param_offload=True)) as engine:
            self.assertEqual((engine.get_data_parallel_rank(), engine.get_data_parallel_size()), (0, 1))
            self.assertTrue(engine.is_mp_src_rank_with_outputs())
            self.assertTrue(engine.is_param_offload_enabled)
            with self.assertRaisesRegex(titanium.BadConfig, "before initialize"):
                engine.infer_batch(batch())
            engine.set_total_training_steps(7)
            engine.initialize()
            with self.assertRaises(titanium.BadConfig):
                engine.initialize()
            engine.initialize(config("llama_bf16"))  # anew, from another config
            self.assertFalse(engine.is_param_offload_enabled)
            self.assertEqual(len(engine.infer_batch(batch())["model_output"]), 1)
        engine.close()
        with self.assertRaisesRegex(titanium.ServerDied, "closed"):
            engine.optimizer_step()

    def test_a_value_model(self):
        lines = []
        with spawn(model_type="value_model", log=lines.append) as engine:
            engine.initialize()
            output = engine.infer_batch(batch())["model_output"]
            self.assertEqual(list(output), ["values"])
            self.assertEqual(len(output["values"]), 4)
        self.assertTrue(any("score" in line for line in lines), lines)  # all have come when it has ended

    def test_configs_that_are_refused(self):
        for wrong, text in (
            ({**config(), "engin": {}}, "engin"),
            ({**config(), "engine": {"dtype": "float31"}}, "float31"),
            (3, "config"),
        ):
            with self.assertRaisesRegex(titanium.BadConfig, text):
                spawn(wrong)
        with self.assertRaisesRegex(titanium.BadConfig, "language_model"):
            spawn(model_type="poem_model")
        with self.assertRaises(titanium.TitaniumError):
            with spawn({"model": {"path": "/no/such/folder"}}) as engine:
                engine.initialize()

    def test_bfloat16_as_float32(self):
        if common.ARRAYS != "numpy":
            return
        with spawn(config("llama_bf16"), bf16="float32") as engine:
            engine.initialize()
            for _, array in engine.get_per_tensor_param().tensors():
                self.assertEqual(array.dtype, np.float32)

    def test_the_log_comes_through(self):
        class Closed:
            def write(self, text):
                raise ValueError("I/O operation on closed file")

        with spawn(log=Closed()) as engine:
            engine.initialize()
            engine.infer_batch(batch())

    def test_threads_wait_for_one_another(self):
        with spawn() as engine:
            engine.initialize()
            results = []
            threads = [
                threading.Thread(target=lambda: results.append(engine.infer_batch(batch())["model_output"]["log_probs"]))
                for _ in range(4)
            ]
            for t in threads:
                t.start()
            for t in threads:
                t.join()
            self.assertEqual(len(results), 4)
            for r in results:
                np.testing.assert_array_equal(to_numpy(r.values), to_numpy(results[0].values))

    def test_a_server_outlives_the_thread_that_spawned_it(self):
        made = []
        thread = threading.Thread(target=lambda: made.append(spawn()))
        thread.start()
        thread.join()
        with made[0] as engine:
            engine.initialize()
            engine.infer_batch(batch())


class Listening(unittest.TestCase):
    def serve(self, address, *args):
        process = subprocess.Popen(
            [os.environ["TITANIUM_BINARY"], "serve", "--listen", address, *args],
            stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self.addCleanup(process.stderr.close)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        for line in process.stderr:
            if "listening on " in line:
                return process, line.split("listening on ")[1].strip()
        self.fail("it does not listen")

    def check(self, address):
        process, address = self.serve(address)
        with self.assertRaisesRegex(titanium.BadConfig, "create first"):
            titanium.connect(address, arrays=common.ARRAYS)
        engine = titanium.connect(address, config=config(), arrays=common.ARRAYS)
        engine.initialize()
        with self.assertRaisesRegex(titanium.BadConfig, "one at a time"):
            titanium.connect(address, arrays=common.ARRAYS)
        first = engine.infer_batch(batch())["model_output"]["log_probs"]
        scope = engine.train_mode()
        scope.__enter__()
        engine.param_groups[0]["lr"] = 0.5
        engine.optimizer_zero_grad()
        engine.close()
        again = titanium.connect(address, arrays=common.ARRAYS)  # the engine is still there, its scopes are not
        self.assertEqual(again.param_groups[0]["lr"], 0.5)
        with self.assertRaises(titanium.BadConfig):
            again._call("exit_mode")
        second = again.infer_batch(batch())["model_output"]["log_probs"]
        np.testing.assert_array_equal(to_numpy(first.values), to_numpy(second.values))
        again.close()
        process.terminate()
        self.assertEqual(process.wait(10), 0)
        return process

    def test_tcp(self):
        self.check("tcp:127.0.0.1:0")

    def test_abstract(self):
        self.check(f"unix:@titanium-engine-test-{os.getpid()}")

    def test_file(self):
        with tempfile.TemporaryDirectory() as folder:
            self.check(f"unix:{folder}/socket")
            self.assertEqual(os.listdir(folder), [])

    def test_strangers_do_not_end_it(self):
        import json
        import socket

        with tempfile.TemporaryDirectory() as folder:
            with open(f"{folder}/config.json", "w") as file:
                json.dump(config(), file)
            process, address = self.serve("tcp:127.0.0.1:0", "--config", f"{folder}/config.json")
        port = int(address.rpartition(":")[2])
        for text in (b"", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"titanium" + bytes(16), os.urandom(1000)):
            with socket.create_connection(("127.0.0.1", port)) as sock:
                sock.sendall(text)
        with titanium.connect(address, arrays=common.ARRAYS) as engine:
            engine.initialize()
            engine.infer_batch(batch())
        self.assertIsNone(process.poll())


class Protocol(unittest.TestCase):
    """A server spoken to by hand."""

    def setUp(self):
        from titanium import process, wire

        self.wire = wire
        env = {"OMP_NUM_THREADS": "1"}
        self.server = process.ServerProcess(process.find_binary(), [], env, lambda line: None)
        self.channel = wire.Channel(self.server.socket)
        self.assertEqual(self.channel.receive().name, "hello")

    def tearDown(self):
        self.channel.close()
        self.server.wait(10)

    def call(self, id, method, args=None, tensors=None):
        self.channel.send(self.wire.Message("method", method, id, args, tensors))

    def start(self):
        self.call(1, "create", {"config": config()})
        self.call(2, "initialize")  # calls may be sent ahead; they are answered in order
        self.assertEqual([self.channel.receive().id for _ in range(2)], [1, 2])

    def ask_with_own_loss(self):
        from titanium.batch import encode_batch

        args, tensors = encode_batch(batch(micro={"given": [[0, 1, 2, 3]]}))
        self.call(3, "forward_backward_batch", {**args, "loss": {"name": "external"}}, tensors)
        question = self.channel.receive()
        self.assertEqual((question.type, question.name, question.body), ("method", "loss", {"i": 0, "forward_only": False}))
        return question

    def test_calls_while_the_engine_waits_for_a_loss(self):
        self.start()
        question = self.ask_with_own_loss()
        self.call(4, "optimizer_step")
        refused = self.channel.receive()
        self.assertEqual((refused.type, refused.name, refused.id), ("error", "BadConfig", 4))
        reply = self.wire.Message("reply", "loss", question.id, {"loss": 0.5})
        self.channel.send(reply)
        answer = self.channel.receive()
        self.assertEqual((answer.type, answer.id), ("reply", 3))
        self.call(5, "close")
        self.assertEqual(self.channel.receive().id, 5)
        self.assertEqual(self.server.wait(10)[0], 0)

    def test_answers_that_are_none(self):
        self.start()
        question = self.ask_with_own_loss()
        self.channel.send(self.wire.Message("reply", "loss", question.id + 7, {"loss": 0.5}))
        refused = self.channel.receive()
        self.assertEqual((refused.type, refused.name), ("error", "BadData"))
        self.assertIn("id", refused.text)

    def test_bytes_that_are_no_message(self):
        self.channel.socket.sendall(os.urandom(100))
        refused = self.channel.receive()
        self.assertEqual((refused.type, refused.name, refused.id), ("error", "BadData", 0))
        with self.assertRaises(self.wire.ConnectionLost):
            self.channel.receive()
        self.assertEqual(self.server.wait(10)[0], 3)

    def test_a_reply_where_a_call_belongs(self):
        self.channel.send(self.wire.Message("reply", "loss", 1))
        self.assertEqual(self.channel.receive().name, "BadData")
        self.assertEqual(self.server.wait(10)[0], 3)

    def test_messages_of_every_shape(self):
        """Arguments and tensors of wrong types, in every method: refused, and the server lives."""
        self.start()
        random = np.random.default_rng(7)
        values = [None, True, -1, 10**18, 0.5, "x", [], [1], {}, {"given": [[0]]}, [[0, "a"]], "float32", {"name": "sft"}]
        keys = ["steps", "mode", "failed", "loss", "micro", "counts", "temperature", "param_groups", "dtype", "keep_fp32",
                "bucket_bytes", "stream", "device", "model", "global_step", "max_ckpt_to_keep", "forward_only"]  # fmt: skip
        methods = ["set_total_training_steps", "enter_mode", "exit_mode", "forward_backward_batch", "forward_step", "infer_batch",
                   "train_batch", "set_param_groups", "weights_begin", "weights_next", "weights_end", "to", "attach",
                   "optimizer_step", "lr_scheduler_step", "exit_disable_adapter", "save_checkpoint"]  # fmt: skip
        from titanium.arrays import Raw, to_raw

        good = {"input_ids": to_raw([1, 2, 3]), "offsets": to_raw([0, 3])}
        arrays = [to_raw(a) for a in ([0, 3], [3, 0], [1.5], [-1, 2**60, 3], np.zeros((2, 2)), np.zeros(3, np.float16), [True] * 3)]
        arrays += [Raw("BF16", (3,), bytes(6)), Raw("U64", (1,), bytes(8)), Raw("I64", (0,), b"")]
        names = ["input_ids", "offsets", "loss_mask", "temperature", "group", "columns.a", "seq_columns.a", "other"]
        outcomes = set()
        for i in range(600):
            method = methods[random.integers(len(methods))]
            args = {keys[random.integers(len(keys))]: values[random.integers(len(values))] for _ in range(random.integers(3))}
            tensors = dict(good) if random.random() < 0.7 else {}
            for _ in range(random.integers(3)):
                tensors[names[random.integers(len(names))]] = arrays[random.integers(len(arrays))]
            if method not in ("forward_backward_batch", "forward_step", "infer_batch", "train_batch"):
                tensors = {}
            self.call(100 + i, method, args, tensors)
            answer = self.channel.receive()
            self.assertEqual(answer.id, 100 + i)
            self.assertNotEqual(answer.name, "Bug", f"{method} {args} {list(tensors)}: {answer.text}")
            outcomes.add(answer.type)
        self.assertEqual(outcomes, {"reply", "error"})


if __name__ == "__main__":
    unittest.main()

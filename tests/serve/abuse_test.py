"""What no caller should do: each is refused by an error of its kind, and the engine behind it lives on."""

import os
import shutil
import socket
import tempfile
import unittest

import common
import numpy as np
import titanium
from common import batch, config, spawn, to_numpy
from titanium.receiver import Receiver

NAN, INF, MOST = float("nan"), float("inf"), 2**63 - 1
REFUSED = (titanium.BadConfig, titanium.BadData, titanium.BadCheckpoint)


class BadText(Exception):
    def __str__(self):
        raise RuntimeError("no text")


class Abuse(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.engine = spawn()
        cls.engine.initialize()
        cls.folder = tempfile.mkdtemp()

    @classmethod
    def tearDownClass(cls):
        cls.engine.close()
        shutil.rmtree(cls.folder)

    def tearDown(self):
        self.assertEqual(len(self.engine.infer_batch(batch())["model_output"]["log_probs"]), 4, "the engine lives on")
        self.assertIsNone(self.engine.mode)

    def refused(self, text, call, *args, **options):
        with self.assertRaisesRegex(REFUSED, text):
            call(*args, **options)

    def forward(self, loss="sft", **changed):
        return self.engine.forward_backward_batch({**batch(), **changed}, loss)

    def test_splits(self):
        self.assertEqual(len(self.forward(micro={"max_tokens": MOST})["loss"]), 1)
        self.refused("multiple", self.forward, micro={"max_tokens": 64, "count_divisor": MOST})
        self.refused("multiple of 3", self.forward, micro={"sequences": 2, "count_divisor": 3})
        self.refused("no micro-batch", self.forward, micro={"given": []})
        self.refused("a row in micro is 0.5", self.forward, micro={"given": [[0.5, 1], [2, 3]]})
        self.refused("list of lists", self.forward, micro={"given": [0, 1]})

    def test_counts(self):
        masked = np.zeros(24, int)
        self.refused("sequences without", self.forward, loss_mask=masked, counts={"tokens": 0, "sequences": 0})
        self.refused("2\\^53", self.forward, counts={"tokens": 100, "sequences": MOST, "untrained": MOST})
        self.refused("counts.tokens is 100.7", self.forward, counts={"tokens": 100.7, "sequences": 4})
        self.refused("counts.tokens is None", self.forward, counts={"tokens": None, "sequences": 4})
        self.refused("counts is a list", self.forward, counts=[1, 2])

    def test_temperatures(self):
        for value in (0, -1, NAN, INF, 1e-320, 1e-40, [1, 1, 1, NAN], [1e-40] * 4, [1] * 3, True):
            self.refused("temperature", self.forward, temperature=value)
        cold = to_numpy(self.engine.infer_batch(batch(temperature=1e-20))["model_output"]["log_probs"].values)
        self.assertTrue(np.isfinite(cold).all())
        self.forward(temperature=np.float32(0.5))

    def test_columns_that_are_not_finite(self):
        modes = ("vanilla", "gspo", "sapo", "gpg", "dro", "cispo", "dppo_tv", "dppo_kl", "clip_cov", "kl_cov", "geo_mean")
        for mode in modes:
            for name in ("advantages", "old_log_probs"):
                for value in (NAN, INF, -INF):
                    columns = {"advantages": np.ones(24), "old_log_probs": np.full(24, -5.0)}
                    columns[name][3] = value
                    loss = {"name": "policy", "policy_loss": {"loss_mode": mode}}
                    self.refused(f"sample 0, token 3: column '{name}'", self.forward, loss, columns=columns)
                    columns[name][[3, 0]] = 1, value  # where no token is trained on nobody looks
        self.forward({"name": "policy"}, columns=columns)
        self.assertGreater(self.engine.optimizer_step(), 0)
        self.engine.optimizer_zero_grad()

    def test_losses_of_another_model(self):
        columns = {"values": np.ones(24), "returns": np.ones(24)}
        self.refused("needs the values", self.forward, "value", columns=columns)
        pairs = {"group": [0, 0, 1, 1], "seq_columns": {"chosen": [1, 0, 1, 0]}}
        self.refused("needs the values", self.forward, "reward_model", **pairs)

    def test_settings_that_are_no_json(self):
        columns = {"advantages": np.ones(24), "old_log_probs": np.full(24, -5.0)}
        deep = {}
        for _ in range(2000):
            deep = {"a": deep}
        for key, value in (("clip_ratio", NAN), ("clip_ratio", INF), ("clip_ratio", set()), ("policy_loss", deep),
                           ("kl_loss_type", "a\udcff"), ("seed", 2**64 - 1), ("seed", 10**400),
                           ("rollout_correction", {"rollout_is": "tok"})):  # fmt: skip
            self.refused("", self.forward, {"name": "policy", key: value}, columns=columns)
        self.refused("clip_ratio is nan", self.forward, {"name": "policy", "clip_ratio": NAN}, columns=columns)
        self.forward({"name": "policy", "clip_ratio": np.float32(0.2)}, columns=columns)
        self.refused("type", self.engine.get_per_tensor_param, dtype=np.float32)
        self.refused("Unicode", self.forward, columns={"a\udcff": np.ones(24)})
        self.refused("threads", self.engine.get_per_tensor_param, threads=10**6)
        self.refused("threads", self.engine.get_per_tensor_param, threads=2**32 + 1)

    def test_arguments_of_other_types(self):
        engine = self.engine
        for call in (
            lambda: engine.infer_batch(None),
            lambda: self.forward(columns=[1]),
            lambda: self.forward(calculate_entropy="no"),
            lambda: engine.forward_backward_batch(batch(), "sft", forward_only="no"),
            lambda: engine.set_total_training_steps(5.7),
            lambda: engine.save_checkpoint(self.folder + "/a", 2.9),
            lambda: engine.save_checkpoint(self.folder + "/a", "x"),
            lambda: engine.save_checkpoint(self.folder + "/a", 1, 1.9),
            lambda: engine.save_checkpoint(self.folder + "/a\0b", 1),
            lambda: engine.save_checkpoint(self.folder + "/a\udcff", 1),
            lambda: engine.save_checkpoint("", 1),
            lambda: engine.load_checkpoint(None),
            lambda: engine.load_checkpoint(""),
            lambda: engine._call("save_checkpoint", {"local_path": self.folder + "/a\0b"}),
        ):
            self.refused("", call)
        self.assertEqual(os.listdir(self.folder), [], "and nothing is saved under a part of the name")
        engine.save_checkpoint((self.folder + "/\u00e9t\u00e9 \u6f22 \U0001f600").encode(), 1)
        engine.load_checkpoint(self.folder + "/\u00e9t\u00e9 \u6f22 \U0001f600")
        shutil.rmtree(self.folder)
        os.makedirs(self.folder)

    def test_rows_of_other_lengths(self):
        other = titanium.Jagged(np.ones(24), [0, 6, 12, 18, 24])
        self.refused("rows have other lengths", self.forward, loss_mask=titanium.Jagged(np.ones(24, int), [0, 6, 12, 18, 24]))
        self.refused("rows have other lengths", self.forward, columns={"advantages": other})

    def test_a_bad_group_does_not_keep_a_scope_open(self):
        engine = self.engine
        before = dict(engine.param_groups[0])
        with self.assertRaisesRegex(titanium.BadConfig, "lr"):
            with engine.train_mode():
                self.forward()
                engine.param_groups[0]["lr"] = -1
                engine.optimizer_step()
        engine.param_groups[0].update(before)
        self.assertEqual(engine.optimizer_step(), 0, "its gradients are gone")
        with self.assertRaisesRegex(titanium.BadConfig, "no mode"):
            engine._call("exit_mode")
        engine.param_groups[0]["momentum"] = 0.5
        self.refused("momentum", engine.optimizer_step)
        del engine.param_groups[0]["momentum"]

    def test_an_engine_outlives_a_config_that_is_refused(self):
        self.refused("parallel", self.engine.initialize, config(tensor_parallel_size=2))
        self.refused("nope", self.engine.initialize, config(nope=1))
        self.assertEqual(len(self.engine.param_groups), 1)

    def test_answers_of_a_loss(self):
        def answer(**changed):
            return lambda i, stats: {"loss": 1.0, "gradients": {"log_probs": np.zeros(len(stats.log_probs))}, **changed}

        cases = [
            ("loss is a str", answer(loss="abc")), ("loss is a NoneType", answer(loss=None)),
            ("loss is a ndarray", answer(loss=np.ones(2))), ("gradients is a list", answer(gradients=[1])),
            ("metrics is a list", answer(metrics=[1])), ("metric 'a' is a str", answer(metrics={"a": "b"})),
            ("metric 'a' is a int", answer(metrics={"a": 10**400})), ("Unicode", answer(metrics={"a\udcff": 1})),
            ("one op", lambda i, stats: answer(metrics={"a": {"sum": 1, "op": ("mean", "max")[i]}})(i, stats)),
        ]  # fmt: skip
        for text, loss in cases:
            self.refused(text, self.forward, loss, micro={"sequences": 2})
            self.assertEqual(self.engine.optimizer_step(), 0, "half a sum is not kept")
        for failure in (BadText(), OSError(2, "no", "a\udcff"), ValueError("x" * 200_000_000), KeyboardInterrupt()):

            def loss(i, stats, failure=failure):
                raise failure

            with self.assertRaises(type(failure)):
                self.forward(loss)
            self.engine.optimizer_step()

    def test_a_stream_that_another_ended_is_not_complete(self):
        folder = shutil.copytree(common.model(), self.folder + "/model")
        with open(folder + "/model.safetensors", "rb") as file:
            before = file.read()
        for end in (lambda stream: stream.close(), lambda stream: self.engine.get_per_tensor_param()):
            stream = self.engine.get_per_tensor_param(dtype="float32", bucket_bytes=1000)
            next(stream)
            end(stream)
            with self.assertRaises(REFUSED):
                Receiver(folder).take_stream(stream)
        stream = self.engine.get_per_tensor_param(bucket_bytes=1000)
        self.engine.get_per_tensor_param()
        with self.assertRaisesRegex(titanium.BadConfig, "before its last tensor"):
            list(stream)
        with open(folder + "/model.safetensors", "rb") as file:
            self.assertEqual(file.read(), before)
        shutil.rmtree(folder)

    def test_targets_that_cannot_take_weights(self):
        stream = self.engine.get_per_tensor_param(dtype="float32")
        frozen = np.zeros(64, np.float32)
        frozen.flags.writeable = False
        for target in (None, [1]):
            self.refused("target", Receiver, target)
        for array, options in (([0.0] * 64, {}), (frozen, {}), (np.zeros(64, np.int32), {"convert": True})):
            stream = self.engine.get_per_tensor_param(dtype="float32")
            self.refused("model.norm.weight", Receiver({"model.norm.weight": array}, **options).take_stream, stream)
        stream.close()

    def test_a_fork_cannot_speak_for_its_parent(self):
        outcome, said = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                with self.engine:  # its end is not that of the parent's engine
                    self.engine.infer_batch(batch())
            except BaseException as error:
                os.write(said, type(error).__name__.encode())
            finally:
                os._exit(0)
        os.close(said)
        os.waitpid(child, 0)
        self.assertEqual(os.read(outcome, 100), b"BadConfig")
        os.close(outcome)


class Starts(unittest.TestCase):
    def test_a_listener_that_says_nothing(self):
        with socket.socket(socket.AF_UNIX) as mute:
            mute.bind(f"\0titanium-mute-{os.getpid()}")
            mute.listen()
            with self.assertRaisesRegex(titanium.BadConfig, "not greeted"):
                titanium.connect(f"unix:@titanium-mute-{os.getpid()}", timeout=0.2)

    def test_addresses_and_environments(self):
        for address in (5, None, b"unix:/x", "tcp:127.0.0.1:\u00b2", "tcp:" + "a" * 70 + ":1", "tcp:a\udcff:1", "unix:/a\0b"):
            with self.assertRaises(titanium.BadConfig):
                titanium.connect(address, timeout=2)
        for options in ({"env": {"A": 5}}, {"env": 5}, {"args": 5}, {"args": ["\0"]}):
            with self.assertRaises(titanium.BadConfig):
                titanium.spawn(config(), **options)


if __name__ == "__main__":
    unittest.main()

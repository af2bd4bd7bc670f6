"""A server spoken to by hand, message by message."""

import os
import unittest

import numpy as np
from common import batch, config
from titanium import process, wire
from titanium.arrays import Raw, to_raw
from titanium.batch import encode_batch


class Protocol(unittest.TestCase):
    def setUp(self):
        env = {"OMP_NUM_THREADS": "1"}
        self.server = process.ServerProcess(process.find_binary(), [], env, lambda line: None)
        self.channel = wire.Channel(self.server.socket)
        self.assertEqual(self.channel.receive().name, "hello")

    def tearDown(self):
        self.channel.close()
        self.server.wait(10)

    def call(self, id, method, args=None, tensors=None):
        self.channel.send(wire.Message("method", method, id, args, tensors))

    def start(self):
        self.call(1, "create", {"config": config()})
        self.call(2, "initialize")  # calls may be sent ahead; they are answered in order
        self.assertEqual([self.channel.receive().id for _ in range(2)], [1, 2])

    def ask_with_own_loss(self):
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
        reply = wire.Message("reply", "loss", question.id, {"loss": 0.5})
        self.channel.send(reply)
        answer = self.channel.receive()
        self.assertEqual((answer.type, answer.id), ("reply", 3))
        self.call(5, "close")
        self.assertEqual(self.channel.receive().id, 5)
        self.assertEqual(self.server.wait(10)[0], 0)

    def test_answers_that_are_none(self):
        self.start()
        question = self.ask_with_own_loss()
        self.channel.send(wire.Message("reply", "loss", question.id + 7, {"loss": 0.5}))
        refused = self.channel.receive()
        self.assertEqual((refused.type, refused.name), ("error", "BadData"))
        self.assertIn("id", refused.text)

    def test_bytes_that_are_no_message(self):
        self.channel.socket.sendall(os.urandom(100))
        refused = self.channel.receive()
        self.assertEqual((refused.type, refused.name, refused.id), ("error", "BadData", 0))
        with self.assertRaises(wire.ConnectionLost):
            self.channel.receive()
        self.assertEqual(self.server.wait(10)[0], 3)

    def test_a_reply_where_a_call_belongs(self):
        self.channel.send(wire.Message("reply", "loss", 1))
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

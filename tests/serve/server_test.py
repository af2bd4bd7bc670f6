"""Servers: made, refused, shared by threads, listened to at every kind of address."""

import json
import os
import socket
import subprocess
import tempfile
import threading
import unittest

import common
import numpy as np
import titanium
from common import batch, config, spawn, to_numpy


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

    def test_a_signal_ends_it_beside_a_client(self):
        with tempfile.TemporaryDirectory() as folder:
            process, address = self.serve(f"unix:{folder}/socket")
            engine = titanium.connect(address, config=config(), arrays=common.ARRAYS)
            engine.initialize()
            process.terminate()
            self.assertEqual(process.wait(10), 0)
            with self.assertRaisesRegex(titanium.ServerDied, "socket"):
                engine.infer_batch(batch())
            self.assertEqual(os.listdir(folder), [])

    def test_tcp(self):
        self.check("tcp:127.0.0.1:0")

    def test_abstract(self):
        self.check(f"unix:@titanium-engine-test-{os.getpid()}")

    def test_file(self):
        with tempfile.TemporaryDirectory() as folder:
            self.check(f"unix:{folder}/socket")
            self.assertEqual(os.listdir(folder), [])

    def test_strangers_do_not_end_it(self):
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


if __name__ == "__main__":
    unittest.main()

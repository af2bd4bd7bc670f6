"""The Python half of the wire, against itself and against servers made of a few lines."""

import os
import socket
import struct
import threading
import unittest
import unittest.mock

import common
import numpy as np
import titanium
from titanium import arrays, client, wire


def channels():
    a, b = socket.socketpair()
    return wire.Channel(a), wire.Channel(b)


def message(**tensors):
    return wire.Message("method", "train_batch", 3, {"x": [1, None, "é"]}, {n: arrays.to_raw(t) for n, t in tensors.items()})


class Wire(unittest.TestCase):
    def test_messages_come_back(self):
        left, right = channels()
        before = common.open_descriptors()
        big = np.arange(400_000, dtype=np.float64)
        sent = message(
            mask=np.array([True, False]), big=big, empty=np.zeros((0, 3), np.float32), list=[1, 2], scalar=np.float32(2)
        )
        sent.tensors["brain"] = arrays.Raw("BF16", (2,), np.array([0x3F80, 0xC000], np.uint16).view("uint8").data)
        left.send(sent)  # in a memfd: nobody need read meanwhile
        got = right.receive()
        self.assertEqual((got.type, got.name, got.id, got.body), ("method", "train_batch", 3, sent.body))
        take = arrays.ArrayFactory("numpy")
        np.testing.assert_array_equal(take(got.tensors["big"]), big)
        self.assertEqual(take(got.tensors["empty"]).shape, (0, 3))
        self.assertEqual(take(got.tensors["scalar"]).shape, ())
        np.testing.assert_array_equal(take(got.tensors["mask"]), [True, False])
        np.testing.assert_array_equal(take(got.tensors["list"]), [1, 2])
        self.assertEqual(take(got.tensors["brain"]).dtype, np.uint16)
        np.testing.assert_array_equal(arrays.ArrayFactory("numpy", "float32")(got.tensors["brain"]), [1.0, -2.0])
        take(got.tensors["big"])[0] = 5  # a private mapping: it may be written to
        left.send(message(small=[1.5]))
        np.testing.assert_array_equal(take(right.receive().tensors["small"]), [1.5])
        del got
        self.assertEqual(common.open_descriptors(), before)
        with unittest.mock.patch.object(wire.mmap, "mmap", wraps=wire.mmap.mmap) as mapped:
            mapped.side_effect = lambda fd, *_: self.assertFalse(os.get_inheritable(fd)) or unittest.mock.DEFAULT
            left.send(message(big=big))
            right.receive()  # a program that another thread starts meanwhile must not get hold of the memfd
        mapped.assert_called_once()
        left.close()
        with self.assertRaises(wire.ConnectionLost):
            right.receive()
        right.close()

    def test_a_long_message_goes_over_a_stream_in_pieces(self):
        with socket.create_server(("127.0.0.1", 0)) as server:
            left = wire.Channel(socket.create_connection(server.getsockname()))
            right = wire.Channel(server.accept()[0])
        values = {f"t{i}": np.full(1000, i) for i in range(1500)}  # more buffers than one system call takes
        thread = threading.Thread(target=left.send, args=(message(**values),))
        thread.start()
        got = right.receive()
        thread.join()
        self.assertEqual(len(got.tensors), 1500)
        self.assertTrue(all((arrays.ArrayFactory("numpy")(got.tensors[n]) == v).all() for n, v in values.items()))
        left.close(), right.close()

    def test_nonsense_is_refused(self):
        head, buffers, _ = wire.encode(message(a=[1, 2, 3]))
        blob = head + b"".join(bytes(b) for b in buffers)
        for size in range(len(head)):
            with self.assertRaises(titanium.BadData):
                wire.decode(bytearray(blob[:size]))
        random = np.random.default_rng(5)
        for _ in range(2000):
            damaged = bytearray(blob)
            damaged[random.integers(len(damaged))] = random.integers(256)
            try:
                wire.decode(damaged)
            except titanium.BadData:
                pass

    def test_numbers_that_are_not_finite(self):
        for value in (float("inf"), float("-inf"), 0.1):
            self.assertEqual(float(wire.json_number(value)), value)
        self.assertNotEqual(float(wire.json_number(float("nan"))), float(wire.json_number(float("nan"))))

    def test_what_cannot_be_sent(self):
        for bad in (np.zeros(2, np.complex64), np.array(["a"]), object(), ["a"], [2**70]):
            with self.assertRaises(titanium.BadData):
                arrays.to_raw(bad)


class Server:
    """One connection served by a function in a thread."""

    def __init__(self, serve, greet=True):
        self.address = f"unix:@titanium-test-{os.getpid()}-{id(self)}"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind("\0" + self.address[6:])
        listener.listen()

        def run():
            with listener, listener.accept()[0] as sock:
                channel = wire.Channel(sock)
                if greet:
                    channel.send(wire.Message("reply", "hello", 0, {"protocol": 1, "pid": 0, "created": False}))
                serve(channel)

        self.thread = threading.Thread(target=run)
        self.thread.start()


FACTS = {
    "data_parallel_rank": 0,
    "data_parallel_size": 1,
    "is_mp_src_rank_with_outputs": True,
    "is_param_offload_enabled": False,
    "is_optimizer_offload_enabled": False,
}


def answer_create(channel):
    call = channel.receive()
    assert call.name == "create"
    channel.send(wire.Message("reply", "create", call.id, FACTS))


class Errors(unittest.TestCase):
    def test_every_kind_becomes_its_exception(self):
        def serve(channel):
            answer_create(channel)
            for kind in ("BadConfig", "BadData", "BadCheckpoint", "RankLost", "Bug", "Unheard"):
                channel.send(wire.Message("error", kind, channel.receive().id, text=f"of {kind}"))

        server = Server(serve)
        engine = titanium.connect(server.address, config={})
        for kind in (titanium.BadConfig, titanium.BadData, titanium.BadCheckpoint, titanium.RankLost, titanium.Bug):
            with self.assertRaisesRegex(kind, f"^of {kind.__name__}$") as caught:
                engine.optimizer_step()
            self.assertIs(type(caught.exception), kind)
            self.assertIsInstance(caught.exception, titanium.TitaniumError)
        with self.assertRaisesRegex(titanium.TitaniumError, "Unheard"):
            engine.optimizer_step()
        server.thread.join()
        self.assertTrue(issubclass(titanium.BadConfig, ValueError))
        with self.assertRaisesRegex(titanium.ServerDied, "optimizer_step"):
            engine.optimizer_step()
        with self.assertRaisesRegex(titanium.ServerDied, "is gone"):
            engine.optimizer_step()
        engine.close()

    def test_a_server_that_does_not_speak_the_protocol(self):
        server = Server(lambda channel: channel.socket.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n"), greet=False)
        with self.assertRaisesRegex(titanium.ServerDied, "does not speak"):
            titanium.connect(server.address)
        server.thread.join()

    def test_a_reply_that_is_cut(self):
        def serve(channel):
            answer_create(channel)
            channel.receive()
            channel.socket.sendall(wire.FRAME.pack(wire.MAGIC, 1, 0, 100) + b"123")

        server = Server(serve)
        engine = titanium.connect(server.address, config={})
        with self.assertRaisesRegex(titanium.ServerDied, "connection ended"):
            engine.optimizer_step()
        server.thread.join()

    def test_a_memfd_that_is_not_sealed(self):
        def serve(channel):
            fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
            os.ftruncate(fd, 100)
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", fd))]
            channel.socket.sendmsg([wire.FRAME.pack(wire.MAGIC, 1, 1, 100)], rights)
            os.close(fd)

        before = common.open_descriptors()
        server = Server(serve, greet=False)
        with self.assertRaisesRegex(titanium.ServerDied, "sealed"):
            titanium.connect(server.address)
        server.thread.join()
        self.assertEqual(common.open_descriptors(), before)

    def test_addresses(self):
        for address in ("", "unix:", "tcp:localhost", "tcp:127.0.0.1:x", "http://localhost", "unix:/no/such/socket"):
            with self.assertRaises(titanium.BadConfig):
                titanium.connect(address)

    def test_binaries(self):
        for binary in ("/no/such/program", common.SOURCE, __file__):
            with self.assertRaises(titanium.BadConfig):
                titanium.spawn({}, binary=binary)
        with self.assertRaisesRegex(titanium.ServerDied, "status 1"):  # says nothing and ends
            titanium.spawn({}, binary="/bin/false")
        with self.assertRaises(titanium.BadConfig):
            titanium.spawn({}, arrays="jax")

    def test_batches(self):
        from titanium.batch import encode_batch

        for bad in ({}, {"input_ids": [1]}, {"input_ids": [1], "offsets": [0, 1], "mask": [1]}, {"input_ids": 3, "offsets": [0]}):
            with self.assertRaises(titanium.BadData):
                encode_batch(bad)
        for bad in (3, {"loss": "sft"}, []):
            with self.assertRaises(titanium.BadConfig):
                client.encode_loss(bad)


if __name__ == "__main__":
    unittest.main()

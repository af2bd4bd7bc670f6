"""Either side killed at random points: nothing stays behind, and the other side ends with a clear error within ten seconds."""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import unittest
import unittest.mock
import uuid

import common
import titanium

ROUNDS = int(os.environ.get("TITANIUM_DEATH_ROUNDS", 20))
LIMIT = 10.0


def work(engine, rounds=10**9):
    """Every kind of traffic, for as long as it goes."""
    rows = common.batch(micro={"sequences": 1})
    engine.initialize()
    for i in range(rounds):
        with engine.train_mode():
            engine.train_batch(rows, "sft")
            engine.train_batch(rows, common.sft_loss(rows))
        for _ in engine.get_per_tensor_param(bucket_bytes=60_000):
            pass
        with tempfile.TemporaryDirectory() as folder:
            engine.save_checkpoint(os.path.join(folder, "global_step_1"), i)
        engine.lr_scheduler_step()


def shared_memory():
    return set(os.listdir("/dev/shm"))


class Clock:
    """How long one round of everything takes here, so that kills fall all over it."""

    seconds = None

    @classmethod
    def measure(cls):
        if cls.seconds is None:
            begin = time.monotonic()
            with common.spawn() as engine:
                work(engine, 2)
            cls.seconds = time.monotonic() - begin
        return cls.seconds


class Death(unittest.TestCase):
    def setUp(self):
        self.span = Clock.measure()
        self.shared, self.descriptors = shared_memory(), common.open_descriptors()
        self.marker = f"TITANIUM_DEATH={uuid.uuid4()}"
        self.folder = tempfile.mkdtemp()

    def tearDown(self):
        self.assertEqual(os.listdir(self.folder), [], "nothing with a name is left")
        os.rmdir(self.folder)
        self.assertEqual(shared_memory() - self.shared, set())
        self.assertEqual(common.processes_with(self.marker), [])
        self.assertEqual(common.open_descriptors(), self.descriptors)

    def environment(self):
        key, _, value = self.marker.partition("=")
        return {"OMP_NUM_THREADS": "1", key: value, "TMPDIR": self.folder}

    def test_the_server_is_killed(self):
        rng = random.Random(1)
        slowest = 0.0
        for i in range(ROUNDS):
            delay = rng.uniform(0, self.span)
            killer = subprocess.Popen(
                [sys.executable, "-c", KILLER, self.marker, str(delay)], stdout=subprocess.PIPE, text=True
            )
            with self.assertRaises(titanium.ServerDied) as caught:
                with common.spawn(env=self.environment()) as engine:
                    work(engine)
            ended = time.monotonic()
            killed = float(killer.communicate()[0])
            slowest = max(slowest, ended - killed)
            self.assertLess(ended - killed, LIMIT)
            self.assertEqual(caught.exception.returncode, -signal.SIGKILL, str(caught.exception))
            self.assertIn("SIGKILL", str(caught.exception))
            self.assertEqual(common.processes_with(self.marker), [])
        print(f"client told within {slowest:.2f} s", file=sys.stderr)

    def test_the_client_is_killed(self):
        rng = random.Random(2)
        slowest = 0.0
        for i in range(ROUNDS):
            client = subprocess.Popen(
                [sys.executable, "-B", __file__, "work"], env={**os.environ, **self.environment()},
                stderr=subprocess.DEVNULL,
            )  # fmt: skip
            # The server exists, and then some.
            self.assertIsNotNone(common.soon(lambda: len(common.processes_with(self.marker)) > 1, 60))
            time.sleep(rng.uniform(0, self.span))
            self.assertIsNone(client.poll(), "the client came to an end of its own")
            client.kill()
            client.wait()
            took = common.soon(lambda: common.none_with(self.marker), LIMIT)
            self.assertIsNotNone(took, "the server outlived its client")
            slowest = max(slowest, took)
            for name in os.listdir(self.folder):  # the client's own
                subprocess.run(["rm", "-rf", os.path.join(self.folder, name)], check=True)
        print(f"servers ended within {slowest:.2f} s", file=sys.stderr)

    def test_a_client_of_a_listening_server_is_killed(self):
        rng = random.Random(3)
        for i in range(4):
            path = os.path.join(self.folder, "socket")
            server = subprocess.Popen(
                [os.environ["TITANIUM_BINARY"], "serve", "--listen", f"unix:{path}"],
                stderr=subprocess.DEVNULL, env={**os.environ, **self.environment()},
            )  # fmt: skip
            self.assertIsNotNone(common.soon(lambda: os.path.exists(path), 60))
            client = subprocess.Popen(
                [sys.executable, "-B", __file__, "connect", f"unix:{path}"],
                env={**os.environ, **self.environment()}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            self.assertEqual(client.stdout.read(9), b"connected")
            client.stdout.close()
            time.sleep(rng.uniform(0, self.span / 2))
            client.kill()
            client.wait()
            self.assertEqual(server.wait(LIMIT), 5)
            self.assertFalse(os.path.exists(path))
            for name in os.listdir(self.folder):
                subprocess.run(["rm", "-rf", os.path.join(self.folder, name)], check=True)

    def test_a_fork_that_holds_the_socket_does_not_keep_the_server(self):
        client = subprocess.Popen(
            [sys.executable, "-B", __file__, "fork"], env={**os.environ, **self.environment()},
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        child, server = (int(x) for x in client.stdout.readline().split())
        client.stdout.close()
        client.kill()
        client.wait()
        self.assertIsNotNone(common.soon(lambda: server not in common.processes_with(self.marker), LIMIT))
        os.kill(child, signal.SIGKILL)
        self.assertIsNotNone(common.soon(lambda: common.none_with(self.marker), LIMIT))

    def test_a_client_that_just_ends(self):
        for ending in ("exit", "raise", "forget"):
            client = subprocess.run(
                [sys.executable, "-B", __file__, ending], env={**os.environ, **self.environment()},
                stderr=subprocess.DEVNULL, timeout=120,
            )  # fmt: skip
            self.assertEqual(client.returncode, 1 if ending == "raise" else 0, ending)
            self.assertIsNotNone(common.soon(lambda: common.none_with(self.marker), LIMIT), ending)

    def test_a_server_that_is_asked_to_end(self):
        with self.assertRaisesRegex(titanium.ServerDied, "status"):
            with common.spawn(env=self.environment()) as engine:
                os.kill(engine.info["pid"], signal.SIGTERM)
                work(engine)

    def test_a_server_that_stops_is_killed_in_the_end(self):
        engine = common.spawn(env=self.environment())
        os.kill(engine.info["pid"], signal.SIGSTOP)
        with unittest.mock.patch("titanium.client._END", 0.5):
            engine._abandon()  # what forgetting it does
        self.assertEqual(common.processes_with(self.marker), [])


KILLER = """
import os, signal, sys, time
key = sys.argv[1].encode()
def find():
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if key in open(f"/proc/{pid}/environ", "rb").read():
                return int(pid)
        except OSError:
            pass
end = time.monotonic() + 120  # the test itself may have died
while not (pid := find()):
    if time.monotonic() > end:
        sys.exit("no process to kill")
    time.sleep(0.01)
time.sleep(float(sys.argv[2]))
os.kill(pid, signal.SIGKILL)
print(time.monotonic())
"""


def main(what):
    if what == "connect":
        engine = titanium.connect(sys.argv[2], config=common.config(), arrays=common.ARRAYS)
        print("connected", end="", flush=True)
        return work(engine)
    engine = common.spawn()
    if what == "work":
        work(engine)
    if what == "raise":
        raise ValueError("mine")
    if what == "forget":
        del engine
        time.sleep(0.1)
    if what == "fork":
        child = os.fork()
        if child == 0:
            time.sleep(1000)
        print(child, engine.info["pid"], flush=True)
        work(engine)


if __name__ == "__main__":
    if len(sys.argv) > 1 and not sys.argv[1].startswith("-"):
        main(sys.argv[1])
    else:
        unittest.main()

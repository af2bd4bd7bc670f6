"""Two clients with a server each, which are the ranks of one engine.  A client or a server is killed at a random point: the
others end with a clear error within ten seconds, and nothing stays behind."""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import unittest
import uuid

import common
import titanium

ROUNDS = int(os.environ.get("TITANIUM_DEATH_ROUNDS", 20)) // 6
LIMIT = 10.0
LAYOUTS = ({"data_parallel_shard_size": 2}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2})
MARKER = "TITANIUM_RANKS_DEATH"


def work(rank, layout, port, folder, started):
    """Every kind of traffic, for as long as it goes."""
    cfg = {**common.config(**layout), "comm": {"train_timeout_seconds": 60}}
    place = dict(rank=rank, world_size=2, local_rank=rank, local_world_size=2, master_port=port)
    key, _, value = started.partition("=")
    with common.spawn(cfg, log=None, env={"OMP_NUM_THREADS": "1", key: value}, **place) as engine:
        engine.initialize()
        rows = common.batch(micro={"sequences": 1})
        while True:
            with engine.train_mode():
                engine.train_batch(rows, "sft")
                engine.train_batch(rows, common.sft_loss(rows))
            for _ in engine.get_per_tensor_param(bucket_bytes=60_000):
                pass
            engine.save_checkpoint(os.path.join(folder, "global_step_1"), 1)
            engine.lr_scheduler_step()
            print(".", end="", flush=True)


def shared_memory():
    return set(os.listdir("/dev/shm"))


class Run:
    """Both clients, and how long one round of their work takes."""

    def __init__(self, layout, environment):
        self.folder = tempfile.TemporaryDirectory()
        self.marks = [f"{MARKER}_SERVER={uuid.uuid4()}" for _ in range(2)]
        port = str(common.free_port())
        self.logs = [os.path.join(self.folder.name, f"log.{rank}") for rank in range(2)]
        self.clients = []
        for rank in range(2):
            command = [sys.executable, "-B", __file__, "work", str(rank), str(layout), port, self.folder.name, self.marks[rank]]
            with open(self.logs[rank], "w") as log:
                self.clients.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log))

    def server(self, rank):
        """Its pid; a client is not asked, as it is at work."""
        found = common.processes_with(self.marks[rank])
        return found[0] if len(found) == 1 else None

    def rounds(self, count):
        """Waits until rank 0 has done that many."""
        self.clients[0].stdout.read(count)

    def said(self, rank):
        with open(self.logs[rank]) as log:
            return log.read()

    def close(self):
        for client in self.clients:
            client.kill()
            client.wait()
            client.stdout.close()
        self.folder.cleanup()


class Death(unittest.TestCase):
    def setUp(self):
        self.shared = shared_memory()
        self.marker = f"{MARKER}={uuid.uuid4()}"
        key, _, value = self.marker.partition("=")
        self.temporary = tempfile.mkdtemp()
        self.environment = {**os.environ, "OMP_NUM_THREADS": "1", key: value, "TMPDIR": self.temporary}

    def tearDown(self):
        self.assertEqual(os.listdir(self.temporary), [], "nothing with a name is left")
        os.rmdir(self.temporary)
        self.assertEqual(shared_memory() - self.shared, set())

    def kill_one(self, rng, rank, which):
        layout = rng.randrange(len(LAYOUTS))
        run = Run(layout, self.environment)
        try:
            run.rounds(1)
            begin = time.monotonic()
            run.rounds(1)
            time.sleep(rng.uniform(0, time.monotonic() - begin))
            victim = run.clients[rank].pid if which == "client" else run.server(rank)
            self.assertEqual([client.poll() for client in run.clients], [None, None], "a client came to an end of its own")
            os.kill(victim, signal.SIGKILL)
            killed = time.monotonic()
            ended = common.soon(lambda: None not in [client.poll() for client in run.clients], LIMIT)
            self.assertIsNotNone(ended, f"{which} {rank}, {LAYOUTS[layout]}: " + "".join(run.said(r) for r in range(2)))
            self.assertIsNotNone(common.soon(lambda: common.none_with(self.marker), LIMIT - (time.monotonic() - killed)))
            other = 1 - rank
            self.assertEqual(run.clients[other].returncode, 1, run.said(other))
            self.assertRegex(run.said(other), rf"titanium\.errors\.(RankLost|ServerDied): .*rank {rank} ", run.said(other))
            if which == "server":
                self.assertEqual(run.clients[rank].returncode, 1)
                self.assertRegex(run.said(rank), "titanium.errors.ServerDied: .*SIGKILL", run.said(rank))
            return ended
        finally:
            run.close()

    def test_one_of_them_is_killed(self):
        rng = random.Random(4)
        for which in ("client", "server"):
            slowest = max(self.kill_one(rng, rank, which) for rank in (0, 1) for _ in range(max(1, ROUNDS)))
            print(f"{which} killed: all ended within {slowest:.2f} s", file=sys.stderr)

    def test_one_that_never_comes(self):
        cfg = {**common.config(data_parallel_shard_size=2), "comm": {"init_timeout_seconds": 1}}
        with self.assertRaisesRegex(titanium.RankLost, "rank 1|ranks 1"):
            common.spawn(cfg, rank=0, world_size=2, local_rank=0, local_world_size=2, master_port=common.free_port())

    def test_one_that_is_asked_to_end(self):
        run = Run(0, self.environment)
        try:
            run.rounds(1)
            os.kill(run.server(1), signal.SIGTERM)
            self.assertIsNotNone(common.soon(lambda: None not in [client.poll() for client in run.clients], LIMIT))
            self.assertRegex(run.said(0), "RankLost: rank 1 failed: a signal asked the server to end")
            self.assertIsNotNone(common.soon(lambda: common.none_with(self.marker), LIMIT))
        finally:
            run.close()


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] == "work":
        rank, layout, port, folder, started = sys.argv[2:]
        work(int(rank), LAYOUTS[int(layout)], int(port), folder, started)
    else:
        unittest.main()

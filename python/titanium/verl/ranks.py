"""Where a worker of verl stands among the workers of an engine, and how their servers meet."""

import os
import socket
from dataclasses import dataclass

import torch.distributed as dist

from ..errors import BadConfig
from ..process import find_binary

# In the order of torchtitan's ranks: the last one is the fastest.
_AXES = ("pipeline_parallel_size", "data_parallel_replicate_size", "data_parallel_shard_size", "context_parallel_size", "tensor_parallel_size")


@dataclass(frozen=True)
class Mesh:
    """Coordinates of a rank, as plain arithmetic: what verl asks before there is an engine to ask."""

    sizes: tuple  # by axis
    at: tuple

    @classmethod
    def of(cls, engine_config, rank, world_size):
        sizes = [getattr(engine_config, axis) for axis in _AXES]
        rest = 1
        for size in sizes:
            rest *= size if size > 0 else 1
        if sizes[2] == -1 and world_size % rest == 0:  # the ranks that are left
            sizes[2], rest = world_size // rest, world_size
        if rest != world_size or min(sizes) < 1:
            named = " x ".join(f"engine.{axis} {size}" for axis, size in zip(_AXES, sizes))
            raise BadConfig(f"{world_size} workers, but the sizes of the device mesh do not multiply to that: {named}")
        at = []
        for size in reversed(sizes):
            at.append(rank % size)
            rank //= size
        return cls(tuple(sizes), tuple(reversed(at)))

    @property
    def data_parallel_size(self):
        return self.sizes[1] * self.sizes[2]

    @property
    def data_parallel_rank(self):
        return self.at[1] * self.sizes[2] + self.at[2]

    def data_groups(self):
        """Ranks with different data but the same part of the model: every such list, in an order that is the same on all
        ranks, and which of them is ours."""
        pp, replicate, shard, cp, tp = self.sizes
        groups = [
            [((p * replicate * shard + d) * cp + c) * tp + t for d in range(replicate * shard)]
            for p in range(pp)
            for c in range(cp)
            for t in range(tp)
        ]
        return groups, (self.at[0] * cp + self.at[3]) * tp + self.at[4]


def make_data_group(mesh):
    """The torch group of the data ranks.  All workers call it, in the same order."""
    groups, own = mesh.data_groups()
    if len(groups) == 1:
        return dist.group.WORLD
    return [dist.new_group(ranks) for ranks in groups][own]


class Meeting:
    """What `spawn` is told so that the servers of all workers find each other: worker 0 takes a free port of its host."""

    def __init__(self, binary):
        rank, size = dist.get_rank(), dist.get_world_size()
        # Held until the servers have met, so that nobody else takes it: Linux lets both have it while neither listens.
        self._held = None
        self.options = {"rank": rank, "world_size": size}
        if size == 1:
            return
        mine = {"host": _host()}
        try:
            find_binary(binary)
        except BadConfig as error:  # the others would wait for this worker's server
            mine["error"] = str(error)
        if rank == 0:
            self._held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._held.bind(("", 0))
            # The others reach this host by the name under which torch has met.
            mine["addr"] = os.environ.get("MASTER_ADDR") or socket.gethostname()
            mine["port"] = self._held.getsockname()[1]
        all_ranks = [None] * size
        dist.all_gather_object(all_ranks, mine)
        for worker, theirs in enumerate(all_ranks):
            if "error" in theirs:
                self.close()
                raise BadConfig(f"worker {worker}: {theirs['error']}")
        here = [worker for worker, theirs in enumerate(all_ranks) if theirs["host"] == mine["host"]]
        self.options.update(
            local_rank=here.index(rank),
            local_world_size=len(here),
            master_addr="127.0.0.1" if len(here) == size else all_ranks[0]["addr"],
            master_port=all_ranks[0]["port"],
        )

    def close(self):
        if self._held is not None:
            self._held.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def _host():
    """Equal for processes that can share memory and meet by a name of this machine's network."""
    with open("/proc/sys/kernel/random/boot_id") as boot:
        return (socket.gethostname(), boot.read().strip(), os.stat("/proc/self/ns/net").st_ino)

"""The same collectives as bench/collectives.cpp over torch.distributed's gloo: seconds a call, medians, as JSON."""
import json
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def rank_main(rank, repeats, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    flat = torch.zeros(8 << 20)
    half = flat.bfloat16()
    part = flat[rank * (4 << 20):][: 4 << 20]
    calls = {
        "all_reduce": lambda: dist.all_reduce(flat),
        "all_gather": lambda: dist.all_gather_into_tensor(flat, part.clone()),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, flat.clone()),
        "all_reduce_bf16": lambda: dist.all_reduce(half),
        "barrier": dist.barrier,
    }
    results = {}
    for name, call in calls.items():
        call()
        times = []
        for _ in range(repeats):
            dist.barrier()
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        results["torch_" + name] = statistics.median(times)
    if rank == 0:
        print(json.dumps(results), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(rank_main, args=(int(sys.argv[1]) if len(sys.argv) > 1 else 15, port), nprocs=2)

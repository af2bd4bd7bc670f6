#!/usr/bin/env python3
"""Weights from `titanium serve` into this process: bytes a second of whole streams, mapped and then also copied out, beside
numpy's memcpy of as many bytes.   bench/serve_sync.py MODEL [--rounds 5] [--bucket-mib 64] [--tcp]"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "python"))
BINARY = os.environ.get("TITANIUM_BINARY") or os.path.join(os.environ.get("TITANIUM_BUILD", os.path.join(ROOT, "build")), "titanium")

import numpy as np  # noqa: E402
import titanium  # noqa: E402


def stream(engine, options, sink=None):
    """Seconds of one stream; with a sink every byte is read and written once more."""
    begin = time.perf_counter()
    weights = engine.get_per_tensor_param(**options)
    for bucket in weights:
        for array in bucket.values():
            if sink is not None:
                np.copyto(sink[: array.size], array.reshape(-1))
    return weights.nbytes, time.perf_counter() - begin


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bucket-mib", type=int, default=64)
    parser.add_argument("--tcp", action="store_true")
    args = parser.parse_args()
    config = {"model": {"path": os.path.abspath(args.model)}, "engine": {"forward_only": True}}
    server = None
    if args.tcp:
        server = subprocess.Popen([BINARY, "serve", "--listen", "tcp:127.0.0.1:0"], stderr=subprocess.PIPE, text=True)
        address = next(line for line in server.stderr if "listening on " in line).split("listening on ")[1].strip()
        engine = titanium.connect(address, config=config, arrays="numpy")
    else:
        engine = titanium.spawn(config, binary=BINARY, arrays="numpy", log=lambda line: None)
    with engine:
        engine.initialize()
        options = {"bucket_bytes": args.bucket_mib << 20}
        sink = np.zeros(max(int(np.prod(spec[2])) for spec in engine.get_per_tensor_param(**options).specs), np.uint16)
        source, target = np.ones(args.bucket_mib << 20, np.uint8), np.zeros(args.bucket_mib << 20, np.uint8)
        rates = {"mapped": [], "copied": [], "without_checksums": [], "memcpy": []}
        for _ in range(args.rounds + 1):  # the first is for warmth
            for name, seconds in (
                ("mapped", stream(engine, options)),
                ("copied", stream(engine, options, sink)),
                ("without_checksums", stream(engine, {**options, "checksums": False})),
            ):
                rates[name].append(seconds[0] / seconds[1] / 1e9)
            begin = time.perf_counter()
            for _ in range(4):
                np.copyto(target, source)
            rates["memcpy"].append(4 * source.size / (time.perf_counter() - begin) / 1e9)
        print(json.dumps({"unit": "GB/s", **{name: round(statistics.median(v[1:]), 3) for name, v in rates.items()}}))
    if server is not None:
        server.kill()
        server.wait()
        server.stderr.close()


if __name__ == "__main__":
    main()

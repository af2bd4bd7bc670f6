"""Shared by the tests of the Python client and of `titanium serve`.  $TITANIUM_BINARY is the command."""

import json
import os
import socket
import struct
import sys
import time

SOURCE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(SOURCE, "python"))
ARRAYS = os.environ.get("TITANIUM_TEST_ARRAYS", "numpy")

import numpy as np  # noqa: E402

if ARRAYS == "torch":
    import torch  # noqa: F401

import titanium  # noqa: E402

VOCABULARY = 320


def model(name="qwen3"):
    return os.path.join(SOURCE, "tests", "data", "models", name)


def config(name="qwen3", dtype="float32", **engine):
    return {
        "model": {"path": model(name)},
        "engine": {"dtype": dtype, "max_token_len_per_gpu": 256, **engine},
        "optimizer": {"lr": 1e-2, "lr_scheduler_type": "constant", "lr_warmup_steps": 0, "total_training_steps": 100},
    }


def spawn(cfg=None, **options):
    options.setdefault("arrays", ARRAYS)
    options.setdefault("log", lambda line: None)
    options.setdefault("env", {"OMP_NUM_THREADS": "1"})
    return titanium.spawn(cfg or config(), **options)


def batch(lengths=(5, 9, 3, 7), seed=1, **more):
    """Flat rows of made-up tokens; the first two of each are the prompt."""
    random = np.random.default_rng(seed)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    mask = np.ones(offsets[-1], np.int64)
    for begin in offsets[:-1]:
        mask[begin : begin + 2] = 0
    ids = random.integers(0, VOCABULARY, offsets[-1])
    return {"input_ids": ids, "offsets": offsets, "loss_mask": mask, **more}


def to_numpy(array):
    """A result's array as numpy has it; bfloat16 as its bits."""
    if ARRAYS == "torch":
        if str(array.dtype) == "torch.bfloat16":
            array = array.view(torch.int16)
            return array.numpy().view("uint16")
        return array.numpy()
    return array


def read_safetensors(path):
    """name -> (dtype, bytes)."""
    with open(path, "rb") as file:
        data = file.read()
    (size,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    payload = data[8 + size :]
    return {name: (e["dtype"], payload[e["data_offsets"][0] : e["data_offsets"][1]]) for name, e in header.items()}


def trained_tokens(batch):
    mask, offsets = np.asarray(batch["loss_mask"]), np.asarray(batch["offsets"])
    return sum(mask[b + 1 : e].sum() for b, e in zip(offsets, offsets[1:]))


def sft_loss(batch, stats_seen=None, tokens=None):
    """What {"name": "sft"} computes, as a callable: minus the mean log-probability of the trained tokens, of the global batch
    where it is larger than this one."""
    mask, offsets = np.asarray(batch["loss_mask"]), np.asarray(batch["offsets"])
    tokens = tokens or trained_tokens(batch)

    def loss(i, stats):
        log_probs = to_numpy(stats.log_probs).astype(np.float64)
        gradient = np.zeros(len(log_probs))
        bounds = to_numpy(stats.offsets)
        for row, b, e in zip(stats.sample, bounds, bounds[1:]):
            if row < 0:  # filler
                continue
            trained = mask[offsets[row] : offsets[row + 1]]
            gradient[b : e - 1] = -trained[1:] / tokens
        if stats_seen is not None:
            stats_seen.append(stats)
        value = float((gradient * log_probs).sum())
        metrics = {"answers": 1.0, "tokens": {"sum": float((gradient != 0).sum()), "op": "sum"}}
        return {"loss": value, "gradients": {"log_probs": gradient}, "metrics": metrics}

    return loss


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def processes_with(text):
    """Pids whose environment holds the text."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                if text.encode() in file.read():
                    found.append(int(pid))
        except OSError:
            pass
    return found


def none_with(text):
    """Whether no process has the text in its environment, on two looks: one that is in the middle of exec (the command starts itself
    anew with its OpenMP settings) shows no environment."""
    if processes_with(text):
        return False
    time.sleep(0.1)
    return not processes_with(text)


def soon(condition, seconds=10.0):
    """How long it took until the condition held; None when it did not in time."""
    begin = time.monotonic()
    while time.monotonic() - begin < seconds:
        if condition():
            return time.monotonic() - begin
        time.sleep(0.02)
    return None


def open_descriptors():
    return len(os.listdir("/proc/self/fd"))

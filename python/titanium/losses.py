"""Losses that Python computes: a callable's answer for the engine, and callables out of torch functions."""

from .arrays import to_raw
from .batch import STATS
from .errors import BadData
from .wire import json_number


def _number(value, what):
    try:
        return json_number(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise BadData(f"loss callable: {what} is a {type(value).__name__}, not a number: {error}") from None


def encode_loss_answer(answer, reply):
    if not isinstance(answer, dict) or "loss" not in answer:
        raise BadData(f"loss callable: it answered {type(answer).__name__}, expected a dict with 'loss' and 'gradients'")
    unknown = [key for key in answer if key not in ("loss", "gradients", "metrics")]
    if unknown:
        raise BadData(f"loss callable: unknown key {unknown[0]!r} in its answer; allowed: loss, gradients, metrics")
    for key in ("metrics", "gradients"):
        if not isinstance(answer.get(key), (dict, type(None))):
            raise BadData(f"loss callable: {key} is a {type(answer[key]).__name__}; allowed: a dict")
    metrics = {}
    for name, value in (answer.get("metrics") or {}).items():
        if not isinstance(value, dict):
            value = {"sum": value}
        numbers = {
            key: _number(part, f"metric {name!r}") for key, part in {"count": 1, **value}.items() if key != "op"
        }
        metrics[str(name)] = {**numbers, "op": str(value.get("op", "mean"))}
    reply.body = {"loss": _number(answer["loss"], "loss"), "metrics": metrics}
    for name, gradient in (answer.get("gradients") or {}).items():
        if name not in STATS:
            raise BadData(f"loss callable: gradient of {name!r}; allowed: {', '.join(STATS)}")
        if gradient is not None:
            reply.tensors[name] = to_raw(gradient, f"loss callable: gradient of {name}")


def autograd_loss(function):
    """A loss callable out of a torch function: function(i, stats) -> (scalar tensor, metrics), where the statistics are
    leaves that require grad."""

    def loss(i, stats):
        import torch

        leaves = {}
        for name in STATS:
            value = getattr(stats, name)
            if value is not None:
                leaf = torch.as_tensor(value).detach().requires_grad_(not stats.forward_only)
                setattr(stats, name, leaf)
                leaves[name] = leaf
        with torch.set_grad_enabled(not stats.forward_only):
            answer = function(i, stats)
        if not isinstance(answer, tuple) or len(answer) != 2 or not isinstance(answer[0], torch.Tensor):
            raise BadData(f"autograd_loss: the function answered {type(answer).__name__}, expected (scalar tensor, metrics)")
        value, metrics = answer
        if stats.forward_only or not value.requires_grad:
            return {"loss": float(value), "metrics": metrics}
        value.backward()
        gradients = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
        return {"loss": float(value.detach()), "gradients": gradients, "metrics": metrics}

    return loss

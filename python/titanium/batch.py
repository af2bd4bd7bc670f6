"""Batches and results in the forms that the engine's methods take and give."""

import sys
from collections.abc import Mapping

from .arrays import flag, integer, raw_to_list, to_raw
from .errors import BadConfig, BadData

_FLAGS = ("calculate_entropy", "calculate_sum_pi_squared", "return_model_output")
_KEYS = ("input_ids", "offsets", "loss_mask", "temperature", "columns", "seq_columns", "group", "micro", "counts")
STATS = ("log_probs", "entropy", "values", "sum_pi_squared")


class Jagged:
    """Rows of different lengths, end to end: row i is values[offsets[i]:offsets[i + 1]]."""

    def __init__(self, values, offsets, row_offsets=None):
        self.values, self.offsets = values, offsets
        self._rows = row_offsets if row_offsets is not None else [int(x) for x in offsets]

    def __len__(self):
        return len(self._rows) - 1

    def __getitem__(self, i):
        if not -len(self) <= i < len(self):
            raise IndexError(f"row {i} of {len(self)}")
        i %= len(self)
        return self.values[self._rows[i] : self._rows[i + 1]]

    def __iter__(self):
        return (self[i] for i in range(len(self)))

    def __repr__(self):
        return f"Jagged(rows={len(self)}, values={self._rows[-1]})"

    def by_token(self):
        """As a column of a batch: entry i of a row is about its token i, where results have entry t for token t + 1.  The
        entry of a row's first token is 0."""
        flat, moved = self.values, self.values.clone() if hasattr(self.values, "clone") else self.values.copy()
        moved[1:] = flat[:-1]
        for begin, end in zip(self._rows, self._rows[1:]):
            if end > begin:
                moved[begin] = 0
        return Jagged(moved, self.offsets, self._rows)

    def nested(self):
        """A torch jagged nested tensor [rows, j]."""
        import torch

        values, offsets = torch.as_tensor(self.values), torch.as_tensor(self.offsets)
        return torch.nested.nested_tensor_from_jagged(values, offsets)


class Stats:
    """What a loss of the caller's own sees of a micro-batch: [T] each, or None where it was not asked for."""

    def __init__(self, message, arrays):
        for name in STATS:
            raw = message.tensors.get(name)
            setattr(self, name, None if raw is None else arrays(raw))
        self.offsets = arrays(message.tensors["offsets"])  # [D + 1], bounds of the documents in T
        self.sample = raw_to_list(message.tensors["sample"])  # [D], the row of the batch that each document is
        self.forward_only = message.body["forward_only"]
        self._rows, self._arrays = raw_to_list(message.tensors["offsets"]), arrays

    def column(self, values, offsets=None):
        """What belongs here of a column [N] of the batch, whose entry i is about token i: [T], entry t about token t + 1 as
        in the statistics, 0 at the end of a document and in filler.  offsets: of the batch, unless `values` is jagged."""
        raw, own = _flat(values, "column")
        if offsets is None and own is None:
            raise BadData("column: offsets of the batch are needed with values that are flat")
        bounds = [int(b) for b in self._arrays(own if offsets is None else to_raw(offsets, "column: offsets"))]
        if bounds[-1] != raw.shape[0]:
            raise BadData(f"column: {raw.shape[0]} values, but the offsets end at {bounds[-1]}")
        flat = self._arrays(raw)
        out = self._arrays.library.zeros(self._rows[-1], dtype=flat.dtype)
        for document, row in zip(self._rows, self.sample):
            if row >= 0:
                begin, end = bounds[row : row + 2]
                out[document : document + end - begin - 1] = flat[begin + 1 : end]
        return out

    def jagged(self, name):
        """A statistic by document."""
        values = getattr(self, name)
        return None if values is None else Jagged(values, self.offsets, self._rows)


def _is_nested(value):
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor) and value.is_nested


def _flat(value, what):
    """Values of a jagged tensor or a flat array, and the offsets of the former."""
    if isinstance(value, Jagged):
        return to_raw(value.values, what), to_raw(value.offsets, what)
    if _is_nested(value):
        if str(value.layout) != "torch.jagged" or value.dim() != 2:
            raise BadData(f"{what}: a nested tensor of layout {value.layout} and {value.dim()} dimensions; allowed: jagged, 2")
        if value.lengths() is not None:  # rows with gaps between them
            value = value.contiguous()
        return to_raw(value.values(), what), to_raw(value.offsets(), what)
    return to_raw(value, what), None


def _integers(raw, what):
    if raw.dtype not in ("I64", "I32"):
        raise BadData(f"{what}: offsets of dtype {raw.dtype}; allowed: integers")
    return memoryview(raw.data).cast("B").cast("q" if raw.dtype == "I64" else "i").tolist() if raw.nbytes else []


def encode_batch(batch):
    """(arguments, tensors) of a batch; what its numbers must be is checked by the engine."""
    if not isinstance(batch, Mapping):
        raise BadData(f"batch: a {type(batch).__name__} is not a dict")
    unknown = [key for key in batch if key not in _KEYS + _FLAGS]
    if unknown:
        raise BadData(f"batch: unknown key {unknown[0]!r}; allowed: {', '.join(_KEYS + _FLAGS)}")
    if "input_ids" not in batch:
        raise BadData("batch: input_ids is missing")
    args = {key: flag(batch.get(key, False), f"batch: {key}") for key in _FLAGS}
    tensors = {}

    def flat(value, what):
        raw, own = _flat(value, what)
        if own is not None and _integers(own, what) != _integers(offsets, "batch: offsets"):
            raise BadData(f"{what}: its rows have other lengths than those of input_ids")
        return raw

    tensors["input_ids"], offsets = _flat(batch["input_ids"], "batch: input_ids")
    if batch.get("offsets") is not None:
        offsets = to_raw(batch["offsets"], "batch: offsets")
    if offsets is None:
        raise BadData("batch: offsets is missing, and input_ids is not a jagged tensor")
    tensors["offsets"] = offsets

    if batch.get("loss_mask") is not None:
        tensors["loss_mask"] = flat(batch["loss_mask"], "batch: loss_mask")
    temperature = batch.get("temperature")
    if isinstance(temperature, bool):
        raise BadData(f"batch: temperature is {temperature}; allowed: a number, or one for each row")
    if getattr(temperature, "shape", None) == () and not _is_nested(temperature):
        temperature = temperature.item()
    if isinstance(temperature, (int, float)):
        args["temperature"] = float(temperature)
    elif temperature is not None:
        tensors["temperature"] = to_raw(temperature, "batch: temperature")
    if batch.get("group") is not None:
        tensors["group"] = to_raw(batch["group"], "batch: group")
    for kind in ("columns", "seq_columns"):
        columns = {} if batch.get(kind) is None else batch[kind]
        if not isinstance(columns, Mapping):
            raise BadData(f"batch: {kind} is a {type(columns).__name__}; allowed: a dict of arrays")
        for name, values in columns.items():
            what = f"batch: {kind} {name!r}"
            tensors[f"{kind}.{name}"] = flat(values, what) if kind == "columns" else to_raw(values, what)
    micro = batch.get("micro")
    if micro is not None:
        if isinstance(micro, Mapping) and micro.get("given") is not None:
            try:
                given = [[integer(i, "batch: a row in micro", BadData) for i in group] for group in micro["given"]]
            except TypeError:
                raise BadData(f"batch: micro: given is {micro['given']!r}; allowed: a list of lists of rows") from None
            micro = {**micro, "given": given}
        args["micro"] = micro
    if batch.get("counts") is not None:
        if not isinstance(batch["counts"], Mapping):
            raise BadData(f"batch: counts is a {type(batch['counts']).__name__}; allowed: a dict of numbers")
        args["counts"] = {key: integer(value, f"batch: counts.{key}", BadData) for key, value in batch["counts"].items()}
    return args, tensors


def decode_output(message, arrays):
    """The result of a forward, as a dict."""
    tensors, output = message.tensors, {}
    names = [name for name in STATS if f"model_output.{name}" in tensors]
    if names:
        offsets, rows = arrays(tensors["offsets"]), raw_to_list(tensors["offsets"])
        output = {name: Jagged(arrays(tensors[f"model_output.{name}"]), offsets, rows) for name in names}
    reports = {
        name: {"op": r["op"], **{key: float(r[key]) for key in ("sum", "count", "spread") if key in r}}
        for name, r in message.body["metrics"].items()
    }
    return {
        "model_output": output,
        "loss": raw_to_list(tensors["loss"]) if "loss" in tensors else [],
        "metrics": {name: float(r["value"]) for name, r in message.body["metrics"].items()},
        "reports": reports,
    }


def encode_loss(loss):
    """How a loss is named in a request."""
    if loss is None:
        return None
    if callable(loss):
        return {"name": "external"}
    if isinstance(loss, str):
        return {"name": loss}
    if isinstance(loss, dict) and isinstance(loss.get("name"), str):
        return loss
    raise BadConfig(f"loss: {loss!r} is neither None, a callable, nor a dict with the name of a built-in loss")

"""verl's batches as the engine takes them, and verl's losses as the engine asks for them."""

import functools

import torch
import torch.distributed as dist
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.dataset_utils import DatasetPadMode
from verl.utils.device import get_device_id
from verl.workers.utils.losses import sft_loss

from ..errors import BadConfig, BadData

STATISTICS = {"language_model": ("log_probs", "entropy", "sum_pi_squared"), "value_model": ("values",)}


def engine_batch(data, groups, *, return_model_output):
    """A batch for the engine's forward_backward_batch, cut into `groups` of rows."""
    _refuse(data)
    input_ids = data["input_ids"]
    if not (isinstance(input_ids, torch.Tensor) and input_ids.is_nested and input_ids.layout == torch.jagged):
        raise BadData("input_ids: a jagged tensor [B, j] is needed (verl's pad_mode no_padding)")
    _check_positions(data, input_ids)
    return {
        "input_ids": input_ids.values(),
        "offsets": input_ids.offsets(),
        "temperature": _temperature(data, len(input_ids)),
        "micro": {"given": groups},
        "calculate_entropy": bool(tu.get_non_tensor_data(data, "calculate_entropy", False)),
        "calculate_sum_pi_squared": bool(tu.get_non_tensor_data(data, "calculate_sum_pi_squared", False)),
        "return_model_output": bool(return_model_output),
    }


def rows_of(micro_batches, indices):
    """Which rows of the batch each micro-batch holds: verl names them (indices), or cuts from first to last (None)."""
    if indices is not None:
        return [[int(i) for i in group] for group in indices]
    rows, begin = [], 0
    for micro_batch in micro_batches:
        rows.append(list(range(begin, begin + len(micro_batch))))
        begin += len(micro_batch)
    return rows


def rows_to_jagged(rows, like):
    """Rows of a statistic [n] each as a jagged tensor with the very offsets of `like`, so that verl may combine them."""
    return torch.nested.nested_tensor_from_jagged(torch.cat(rows).to(like.device), like.offsets())


def is_sft_loss(loss_function):
    """Whether this is verl's own SFT loss, of which the engine has one that never visits the unmasked tokens' vocabulary."""
    while isinstance(loss_function, functools.partial):
        loss_function = loss_function.func
    return loss_function is sft_loss


def add_sft_targets(batch, data, dp_group):
    """What the engine's SFT loss reads: the tokens that count, and how many there are in the global batch."""
    tokens = tu.get_non_tensor_data(data, "batch_num_tokens", None)
    sequences = torch.tensor(len(data), device=get_device_id())
    dist.all_reduce(sequences, group=dp_group)
    batch["loss_mask"] = data["loss_mask"].values()
    batch["counts"] = {"tokens": int(tokens), "sequences": int(sequences)}


class PythonLoss:
    """verl's loss function as the callable that the engine asks once a micro-batch, with statistics for gradients.

    verl's losses carry a factor dp_size, because its engines average gradients over data ranks; ours adds them.  The one
    place where the two meet is the factor 1 / dp_size on what goes back.  Of the ranks that share a micro-batch one is asked.
    """

    def __init__(self, loss_function, micro_batches, rows, names, *, dp_size, dp_group):
        self._function, self._micro_batches, self._names = loss_function, micro_batches, names
        self._number_of = {group[0]: i for i, group in enumerate(rows)}
        self._rows, self._dp_size, self._dp_group = rows, dp_size, dp_group
        self.outputs = [None] * len(rows)  # {"loss", "metrics"} by micro-batch, in verl's terms

    def __call__(self, _, stats):
        if all(row < 0 for row in stats.sample):  # filler: another data rank has more micro-batches
            return {"loss": 0.0}
        number = self._number_of[stats.sample[0]]
        rows = self._rows[number]
        if stats.sample[: len(rows)] != rows or any(row >= 0 for row in stats.sample[len(rows) :]):
            raise BadData(f"micro-batch {number}: the engine packed rows {stats.sample}, not {rows}")
        micro_batch = self._micro_batches[number]
        offsets = micro_batch["input_ids"].offsets()
        tokens = int(offsets[-1])  # what comes after them is filler
        leaves = {}
        for name in self._names:
            value = getattr(stats, name)
            if value is not None:
                leaves[name] = value[:tokens].detach().to(micro_batch["input_ids"].device).requires_grad_()
        with torch.enable_grad():
            outputs = {name: torch.nested.nested_tensor_from_jagged(leaf, offsets) for name, leaf in leaves.items()}
            loss = self.evaluate(number, outputs)
            if loss.requires_grad:
                loss.backward()
        filler = int(stats.offsets[-1]) - tokens
        gradients = {
            name: torch.nn.functional.pad(leaf.grad / self._dp_size, (0, filler))
            for name, leaf in leaves.items()
            if leaf.grad is not None
        }
        return {"loss": self.outputs[number]["loss"] / self._dp_size, "gradients": gradients}

    def evaluate(self, number, model_output):
        """verl's loss of one micro-batch; its value and metrics are kept in `outputs`."""
        loss, metrics = self._function(
            model_output=model_output, data=self._micro_batches[number], dp_group=self._dp_group
        )
        self.outputs[number] = {"loss": loss.detach().item(), "metrics": metrics}
        return loss


def _refuse(data):
    """What verl may ask of an engine and this one does not do; silence would be a wrong result."""
    pad_mode = tu.get_non_tensor_data(data, "pad_mode", DatasetPadMode.NO_PADDING)
    if pad_mode != DatasetPadMode.NO_PADDING:
        raise BadConfig(f"data.pad_mode = {pad_mode}: allowed: no_padding")
    for key, why in (
        ("distillation_use_topk", "top-k distillation needs logits, which this engine never holds"),
        ("distillation_only", "distillation needs logits, which this engine never holds"),
        ("enable_routing_replay", "these models have no router to replay"),
    ):
        if tu.get_non_tensor_data(data, key, False):
            raise BadConfig(f"{key}: {why}")
    extras = tu.get(data, "multi_modal_inputs", None)
    if extras is not None and any(len(extra) for extra in extras if extra is not None):
        raise BadData("multi_modal_inputs: these models take text only")


def _check_positions(data, input_ids):
    positions = tu.get(data, "position_ids", None)
    if positions is None:
        return
    offsets = input_ids.offsets()
    if not positions.is_nested or positions.dim() != 2 or positions.values().shape != input_ids.values().shape:
        raise BadData("position_ids: they must have the rows and lengths of input_ids (no multi-dimensional rope)")
    lengths = offsets.diff()
    expected = torch.arange(len(input_ids.values()), device=offsets.device) - offsets[:-1].repeat_interleave(lengths)
    wrong = torch.nonzero(positions.values().to(offsets.device) != expected)
    if len(wrong):
        at = int(wrong[0])
        row = int(torch.searchsorted(offsets, at, right=True)) - 1
        raise BadData(f"position_ids: row {row} does not count from 0 (entry {at - int(offsets[row])} differs)")


def _temperature(data, count):
    temperature = tu.get(data, "temperature", None)
    if isinstance(temperature, torch.Tensor):
        return temperature.reshape(-1).expand(count).double()
    return 1.0 if temperature is None else float(temperature)

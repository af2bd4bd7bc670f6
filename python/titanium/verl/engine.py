"""verl's BaseEngine over a `titanium serve` process of its own: the model, its gradients and its optimizer live there."""

import contextlib
import dataclasses
import os
from collections.abc import Mapping

import torch
import torch.distributed as dist
from verl.utils import tensordict_utils as tu
from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager
from verl.utils.device import get_device_id, get_device_name
from verl.workers.engine import BaseEngine, EngineRegistry
from verl.workers.engine.utils import postprocess_batch_func, prepare_micro_batches

from ..client import spawn
from ..errors import BadConfig, Bug
from .batches import STATISTICS, PythonLoss, add_sft_targets, engine_batch, is_sft_loss, rows_of, rows_to_jagged
from .ranks import Meeting, Mesh, make_data_group

# HFModelConfig's fields that are objects of Python, not settings.
_OBJECTS = ("hf_config", "generation_config", "tokenizer", "processor", "external_lib")


def _plain(value, name):
    """A config as JSON has it."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if dataclasses.is_dataclass(value):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(entry, f"{name}.{key}") for key, entry in value.items()}
    if isinstance(value, (list, tuple)) or type(value).__name__ == "ListConfig":
        return [_plain(entry, f"{name}[{i}]") for i, entry in enumerate(value)]
    raise BadConfig(f"{name}: a {type(value).__name__} is not a setting")


class _Optimizer:
    """What verl touches of an optimizer: param_groups, whose writes hold from the next optimizer_step on."""

    def __init__(self, client):
        self._client = client

    @property
    def param_groups(self):
        return self._client.param_groups


class TitaniumEngine(BaseEngine):
    """One rank of an engine.  Failures of the engine come as titanium's exceptions (BadConfig, BadData, ...)."""

    model_type = None  # of the subclass: what verl and titanium's registry call it

    def __init__(self, model_config, engine_config, optimizer_config, checkpoint_config):
        super().__init__()
        self.model_config, self.engine_config = model_config, engine_config
        self.optimizer_config, self.checkpoint_config = optimizer_config, checkpoint_config
        self.rank = dist.get_rank()
        self.mode = None
        self.optimizer = None
        # Workers differ in nothing but their place, so what is refused here is refused in all of them.
        self._mesh = Mesh.of(engine_config, self.rank, dist.get_world_size())
        self._data_group = make_data_group(self._mesh)
        # Cheap: no weights are read before initialize().  verl asks for ranks before that.
        with Meeting(engine_config.binary) as meeting:
            self._client = spawn(
                self._config(),
                binary=engine_config.binary,
                model_type=self.model_type,
                device=get_device_name(),
                arrays="torch",
                **meeting.options,
            )
        self._check_place()

    def _check_place(self):
        client, mesh = self._client, self._mesh
        engine = client.get_data_parallel_rank(), client.get_data_parallel_size()
        ours = mesh.data_parallel_rank, mesh.data_parallel_size
        if engine != ours:
            client.close()
            raise Bug(f"worker {self.rank} is data rank {ours[0]} of {ours[1]}, its server {engine[0]} of {engine[1]}")

    def _config(self):
        model = {f.name: getattr(self.model_config, f.name) for f in dataclasses.fields(self.model_config)}
        engine = {f.name: getattr(self.engine_config, f.name) for f in dataclasses.fields(self.engine_config)}
        del engine["binary"]
        config = {
            "comm": engine.pop("comm"),
            "model": {key: value for key, value in model.items() if key not in _OBJECTS},
            "engine": engine,
            "optimizer": None if self.engine_config.forward_only else self.optimizer_config,
            "checkpoint": self.checkpoint_config,
        }
        return {section: _plain(value, section) for section, value in config.items() if value is not None}

    def initialize(self):
        """Reads the weights, makes optimizer and schedule: only now are total_training_steps final."""
        self._client.initialize(self._config())
        self.optimizer = None if self.engine_config.forward_only else _Optimizer(self._client)

    # -- modes ----------------------------------------------------------------------------------------------------

    @property
    def is_param_offload_enabled(self):
        return self._client.is_param_offload_enabled

    @property
    def is_optimizer_offload_enabled(self):
        return self._client.is_optimizer_offload_enabled

    @contextlib.contextmanager
    def train_mode(self, disable_auto_offload=False, zero_grad_on_exit=True):
        """Loads offloaded state on entry; on exit zeroes gradients, if asked or if an exception passes, and offloads."""
        with self._scope(self._client.train_mode(disable_auto_offload, zero_grad_on_exit)):
            yield

    @contextlib.contextmanager
    def eval_mode(self, disable_auto_offload=False, zero_grad_on_exit=True):
        with self._scope(self._client.eval_mode(disable_auto_offload)):
            yield

    @contextlib.contextmanager
    def _scope(self, scope):
        try:
            with scope:
                self.mode = self._client.mode
                yield
        finally:
            self.mode = self._client.mode

    def to(self, device, model=True, optimizer=True, grad=True):
        super().to(device=device, model=model, optimizer=optimizer, grad=grad)
        self._client.to(device, model=model, optimizer=optimizer, grad=grad)

    def disable_adapter(self):
        return self._client.disable_adapter()

    # -- training -------------------------------------------------------------------------------------------------

    def forward_backward_batch(self, data, loss_function, forward_only=False):
        if loss_function is None and not forward_only:
            raise BadConfig("forward_backward_batch: without a loss function forward_only must be True")
        group, size = self.get_data_parallel_group(), self.get_data_parallel_size()
        tokens = data["loss_mask"].sum().to(get_device_id())
        dist.all_reduce(tokens, group=group)
        tu.assign_non_tensor(
            data, sp_size=self.engine_config.context_parallel_size, batch_num_tokens=tokens.item(), dp_size=size
        )
        micro_batches, indices = prepare_micro_batches(data=data, dp_group=group, same_micro_num_in_dp=True)
        micro_batches = [micro_batch.to(get_device_id()) for micro_batch in micro_batches]
        rows = rows_of(micro_batches, indices)
        loss = None
        if loss_function is not None:
            names = STATISTICS[self.model_type]
            loss = PythonLoss(loss_function, micro_batches, rows, names, dp_size=size, dp_group=group)

        wants = forward_only or tu.get_non_tensor_data(data, "return_model_output", False)
        batch = engine_batch(data, rows, return_model_output=wants)
        if not wants and is_sft_loss(loss_function) and data["loss_mask"].is_nested:
            add_sft_targets(batch, data, group)
            result = self._client.forward_backward_batch(batch, {"name": "sft"})
            outputs = [{"loss": value * size, "metrics": {}} for value in result["loss"]]
        elif forward_only:
            result = self._client.forward_backward_batch(batch, None, forward_only=True)
            outputs = self._losses_of(loss, rows, micro_batches, result["model_output"]) if self._shows else []
        else:
            result = self._client.forward_backward_batch(batch, loss)
            outputs = loss.outputs
        if not self._shows:  # the engine has asked another rank for the loss, and verl reads that one's outputs
            return {"model_output": {}, "loss": [], "metrics": {}}
        output = postprocess_batch_func(output_lst=outputs, indices=indices, data=data)
        # Rows come in the order of the batch, however it was cut.
        output["model_output"] = {
            name: rows_to_jagged([statistic.values], data["input_ids"]) for name, statistic in result["model_output"].items()
        }
        return output

    def _losses_of(self, loss, rows, micro_batches, statistics):
        """Loss and metrics by micro-batch of a pass without gradients: nothing to ask the engine for."""
        if loss is None:
            return [{"loss": 1.0, "metrics": {}} for _ in rows]  # what verl reports of a pass without a loss
        with torch.no_grad():
            for number, group in enumerate(rows):
                like = micro_batches[number]["input_ids"]
                outputs = {
                    name: rows_to_jagged([statistic[i] for i in group], like) for name, statistic in statistics.items()
                }
                loss.evaluate(number, outputs)
        return loss.outputs

    def optimizer_zero_grad(self):
        self._client.optimizer_zero_grad()

    def optimizer_step(self):
        """The global norm before clipping; when it is not finite nothing is updated and gradients are zeroed."""
        return self._client.optimizer_step()

    def lr_scheduler_step(self):
        return self._client.lr_scheduler_step()

    # -- ranks ----------------------------------------------------------------------------------------------------

    def get_data_parallel_rank(self):
        return self._mesh.data_parallel_rank

    def get_data_parallel_size(self):
        return self._mesh.data_parallel_size

    def get_data_parallel_group(self):
        return self._data_group

    def is_mp_src_rank_with_outputs(self):
        return self._shows

    @property
    def _shows(self):
        """The rank with the head of a pipeline, which the schedule decides, and of those the first tensor-parallel one."""
        return self._client.is_mp_src_rank_with_outputs()

    # -- weights, state -------------------------------------------------------------------------------------------

    def get_per_tensor_param(self, layered_summon=False, base_sync_done=False, **kwargs):
        """(iterator of (Hugging Face name, full tensor), None): the state dict of transformers, a tied head included, in
        the dtype of the computation, which is what a rollout engine loads.  The iterator is drained before training goes on,
        on all ranks, which get the same tensors in the same order.
        """
        dtype = kwargs.get("dtype") or self.engine_config.dtype
        stream = self._client.get_per_tensor_param(dtype=str(dtype).removeprefix("torch."), tied_head=True)

        def tensors():
            with contextlib.closing(stream):
                for name, tensor in stream.tensors():
                    yield name, tensor.to(get_device_id(), non_blocking=True)

        return tensors(), stream.adapter

    def save_checkpoint(self, local_path, hdfs_path=None, global_step=0, max_ckpt_to_keep=None, **kwargs):
        """The engine's files, huggingface/ with config and tokenizer, and under "extra" the random state of this process."""
        self._client.save_checkpoint(local_path, global_step, max_ckpt_to_keep)
        processor = self.model_config.get_processor()
        if self.rank == 0 and processor is not None:
            processor.save_pretrained(os.path.join(local_path, "huggingface"))
        if "extra" in self._contents("save_contents"):
            torch.save(BaseCheckpointManager.get_rng_state(), self._rng_file(local_path))
        dist.barrier()

    def load_checkpoint(self, local_path, hdfs_path=None, del_local_after_load=True, **kwargs):
        """Nothing is deleted: local_path is the only copy."""
        if local_path is None:
            return
        self._client.load_checkpoint(local_path)
        if "extra" in self._contents("load_contents") and os.path.exists(self._rng_file(local_path)):
            BaseCheckpointManager.load_rng_state(torch.load(self._rng_file(local_path), weights_only=False))
        dist.barrier()

    def _contents(self, key):
        given = None if self.checkpoint_config is None else self.checkpoint_config.get(key)
        return ("model", "optimizer", "extra") if given is None else given

    def _rng_file(self, local_path):
        return os.path.join(local_path, f"rng_world_size_{dist.get_world_size()}_rank_{self.rank}.pt")


@EngineRegistry.register(model_type="language_model", backend="titanium", device=["cpu", "cuda"])
class TitaniumEngineWithLMHead(TitaniumEngine):
    """Answers log_probs and, as asked, entropy and sum_pi_squared."""

    model_type = "language_model"


@EngineRegistry.register(model_type="value_model", backend="titanium", device=["cpu", "cuda"])
class TitaniumEngineWithValueHead(TitaniumEngine):
    """A critic: answers values."""

    model_type = "value_model"

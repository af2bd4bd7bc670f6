"""The engine's config group and its class; the YAML files beside it are hydra's view of the same fields."""

from dataclasses import dataclass, field
from typing import Any, Optional

from verl.workers.config import ActorConfig, CriticConfig, EngineConfig

__all__ = ["TitaniumActorConfig", "TitaniumCriticConfig", "TitaniumEngineConfig"]


@dataclass
class TitaniumEngineConfig(EngineConfig):
    """Every field of verl's TorchtitanEngineConfig under its name, and what is ours at the end.

    The engine reads them: a field has an effect, or changes no result here and leaves a note in the log, or is refused
    with the reason (docs/engine.md lists them).
    """

    wrap_policy: dict[str, Any] = field(default_factory=lambda: {"min_num_params": 0})
    reshard_after_forward: str = "default"
    forward_prefetch: bool = False
    use_orig_params: bool = False
    # false, or {param_dtype, reduce_dtype} as for verl's fsdp
    mixed_precision: Any = False
    offload_policy: bool = False
    use_torch_compile: bool = True
    entropy_from_logits_with_chunking: bool = False
    entropy_from_logits_chunk_size: int = 2048
    entropy_checkpointing: bool = False
    data_parallel_size: int = 1
    data_parallel_replicate_size: int = 1
    data_parallel_shard_size: int = 1
    tensor_parallel_size: int = 1
    expert_parallel_size: int = 1
    expert_tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    context_parallel_size: int = 1
    attn_type: str = "flex"
    spmd_backend: str = "spmd_types"
    activation_checkpoint: str = "selective"
    max_seq_len: Optional[int] = None
    strategy: str = "titanium"

    # dtype of the master weights, as in verl's fsdp group
    model_dtype: str = "fp32"
    # when gradients are summed over ranks: last, or each_micro_batch
    fsdp_reduce: str = "last"
    # how pipeline stages are cut and in which order they run (docs/ranks.md); null: the default of the run file's key
    pipeline_parallel_schedule: str = "1F1B"
    pipeline_parallel_schedule_csv: Optional[str] = None
    pipeline_parallel_layers_per_stage: Optional[int] = None
    pipeline_parallel_first_stage_less_layers: Optional[int] = None
    pipeline_parallel_last_stage_less_layers: Optional[int] = None
    # how ranks wait for each other (docs/ranks.md); between two calls of the engine verl may be at something else for long
    comm: dict[str, Any] = field(
        default_factory=lambda: {"transport": "auto", "init_timeout_seconds": 300, "train_timeout_seconds": 600}
    )
    # the `titanium` command; null: TITANIUM_BINARY, PATH, or the build folder above the package
    binary: Optional[str] = None

    def __post_init__(self):
        super().__post_init__()
        if self.strategy != "titanium":
            raise ValueError(f"engine.strategy = {self.strategy!r}: allowed: titanium")


@dataclass
class TitaniumActorConfig(ActorConfig):
    """verl's PPO actor (or reference policy) with an engine of this backend: `model_engine=titanium`."""

    strategy: str = "titanium"
    titanium: TitaniumEngineConfig = field(default_factory=TitaniumEngineConfig)
    use_remove_padding: bool = True
    use_rollout_log_probs: bool = False

    def __post_init__(self):
        super().__post_init__()
        self.engine = self.titanium


@dataclass
class TitaniumCriticConfig(CriticConfig):
    """verl's PPO critic with an engine of this backend."""

    strategy: str = "titanium"
    titanium: TitaniumEngineConfig = field(default_factory=TitaniumEngineConfig)

    def __post_init__(self):
        super().__post_init__()
        self.engine = self.titanium

"""titanium from Python: a client of `titanium serve`.  Needs numpy or torch, and nothing compiled.

    import titanium
    engine = titanium.spawn(config)
    engine.initialize()
    with engine.train_mode():
        result = engine.train_batch(batch, {"name": "sft"})

docs/serve.md describes batches, results and the protocol; `titanium.verl` is the backend for verl.
"""

from .batch import Jagged
from .client import Engine, connect, spawn
from .errors import BadCheckpoint, BadConfig, BadData, Bug, RankLost, ServerDied, TitaniumError
from .losses import autograd_loss
from .stream import WeightStream

__all__ = [
    "BadCheckpoint",
    "BadConfig",
    "BadData",
    "Bug",
    "Engine",
    "Jagged",
    "RankLost",
    "ServerDied",
    "TitaniumError",
    "WeightStream",
    "autograd_loss",
    "connect",
    "spawn",
]

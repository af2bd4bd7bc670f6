"""The verl backend "titanium": importing this registers it with verl (0.9.1), for language and value models.

verl imports it by itself once the package is installed (entry point `verl.plugins`); VERL_USE_EXTERNAL_MODULES=titanium.verl
does the same and fails loudly.  Then `engine=titanium` with `hydra.searchpath=[pkg://titanium.verl.config]` chooses it.
docs/verl.md is the page for users.
"""

import os

if os.environ.get("TITANIUM_VERL_CPU", "") not in ("", "0"):
    from . import cpu  # noqa: F401  before anything asks verl for its platform

from .config import TitaniumEngineConfig
from .engine import TitaniumEngine, TitaniumEngineWithLMHead, TitaniumEngineWithValueHead

__all__ = ["TitaniumEngine", "TitaniumEngineConfig", "TitaniumEngineWithLMHead", "TitaniumEngineWithValueHead"]

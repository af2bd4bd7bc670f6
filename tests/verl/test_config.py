"""The config groups that the package adds to verl's hydra configs."""

import dataclasses
import os
import subprocess
import sys
import tempfile
import unittest

os.environ.update(VERL_USE_EXTERNAL_MODULES="titanium.verl", VERL_USE_EXTERNAL_PLUGINS="none", TITANIUM_VERL_CPU="1")

import hydra
import tiny
import verl
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import TorchtitanEngineConfig

from titanium.verl.config import TitaniumActorConfig, TitaniumCriticConfig, TitaniumEngineConfig

SEARCH = "hydra.searchpath=[pkg://titanium.verl.config]"


def compose(name, *overrides):
    GlobalHydra.instance().clear()
    folder = os.path.join(os.path.dirname(verl.__file__), "trainer", "config")
    with hydra.initialize_config_dir(folder, version_base=None):
        return hydra.compose(name, overrides=[SEARCH, *overrides])


class Config(unittest.TestCase):
    def test_the_engine_group(self):
        config = compose("sft_trainer_engine", "engine=titanium", "engine.dtype=float32", "engine.max_seq_len=512")
        engine = omega_conf_to_dataclass(config.engine)
        self.assertIsInstance(engine, TitaniumEngineConfig)
        self.assertEqual((engine.strategy, engine.dtype, engine.max_seq_len), ("titanium", "float32", 512))
        # The file has no default of its own: it shows those of the class.
        shown = OmegaConf.to_container(compose("sft_trainer_engine", "engine=titanium").engine)
        for key, value in shown.items():
            if key != "_target_":
                self.assertEqual(value, getattr(TitaniumEngineConfig(), key), key)

    def test_every_field_of_torchtitans_engine_is_there(self):
        ours = {field.name for field in dataclasses.fields(TitaniumEngineConfig)}
        theirs = {field.name for field in dataclasses.fields(TorchtitanEngineConfig)}
        self.assertLessEqual(theirs, ours)
        for field in dataclasses.fields(TorchtitanEngineConfig):
            if field.name not in ("strategy", "router_replay", "wrap_policy"):
                ours, theirs = getattr(TitaniumEngineConfig(), field.name), getattr(TorchtitanEngineConfig(), field.name)
                self.assertEqual(ours, theirs, field.name)

    def test_another_strategy_is_refused(self):
        with self.assertRaisesRegex(ValueError, "allowed: titanium"):
            TitaniumEngineConfig(strategy="fsdp")

    def test_the_ppo_groups(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        folder = tiny.make(temporary.name, value_head=True)
        config = compose(
            "ppo_trainer",
            "model_engine=titanium",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
            "actor_rollout_ref.actor.titanium.dtype=float32",
            "actor_rollout_ref.actor.optim.lr=2e-6",
            "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=2",
            "critic.ppo_micro_batch_size_per_gpu=2",
            f"critic.model.path={folder}/model",
            "+critic.model.override_config.attn_implementation=eager",
        )
        actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
        self.assertIsInstance(actor, TitaniumActorConfig)
        self.assertEqual((actor.strategy, actor.engine.dtype, actor.optim.lr), ("titanium", "float32", 2e-6))
        self.assertEqual(config.actor_rollout_ref.ref.titanium.dtype, "float32")
        self.assertTrue(config.actor_rollout_ref.ref.titanium.forward_only)
        critic = omega_conf_to_dataclass(config.critic)
        self.assertIsInstance(critic, TitaniumCriticConfig)
        self.assertIsInstance(critic.engine, TitaniumEngineConfig)

    def test_verl_finds_the_installed_package_by_itself(self):
        environment = {key: value for key, value in os.environ.items() if not key.startswith("VERL_USE_EXTERNAL")}
        program = (
            "from verl.workers.engine import EngineRegistry\n"
            "for model_type in ('language_model', 'value_model'):\n"
            "    print(sorted(EngineRegistry._engines[model_type]['titanium']))"
        )
        run = subprocess.run([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True, check=True)
        self.assertEqual(run.stdout.splitlines()[-2:], ["['cpu', 'cuda']"] * 2)


if __name__ == "__main__":
    unittest.main()

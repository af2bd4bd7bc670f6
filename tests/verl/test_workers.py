"""verl's engine workers, unmodified, on `titanium` and on verl's own fsdp2 (CPU, fp32): call for call the same numbers.

One process, one rank; fsdp2 is registered for cuda alone, so engines are looked up under that name (both have it).
"""

import os
import tempfile
import unittest
from functools import partial
from unittest import mock

os.environ.update(
    VERL_USE_EXTERNAL_MODULES="titanium.verl",
    VERL_USE_EXTERNAL_PLUGINS="none",
    TITANIUM_VERL_CPU="1",
    VERL_ENGINE_DEVICE="cuda",
    RANK="0",
    LOCAL_RANK="0",
    WORLD_SIZE="1",
    MASTER_ADDR="127.0.0.1",
    MASTER_PORT="0",
)

import tiny
import torch
import transformers
import verl  # noqa: F401  loads titanium.verl
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.utils.distributed import initialize_global_process_group_ray
from verl.workers.config import (
    ActorConfig,
    CriticConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    TrainingWorkerConfig,
)
from verl.workers.engine_workers_tinker import TinkerTrainingWorker
from verl.workers.utils.losses import ppo_loss, sft_loss, value_loss

import titanium
from titanium.verl import TitaniumEngineConfig

VOCAB = 272
LENGTHS = [(5, 9), (3, 4), (12, 7), (4, 16), (9, 2), (6, 6), (2, 11), (7, 8)]  # prompt and response of each sequence


def worker(path, strategy, model_type="language_model", **engine):
    settings = dict(
        dtype="float32",
        use_dynamic_bsz=True,
        max_token_len_per_gpu=40,
        infer_max_token_len_per_gpu=64,
        use_torch_compile=False,
        **engine,
    )
    if strategy == "titanium":
        engine_config = TitaniumEngineConfig(**settings)
    else:
        precision = {"param_dtype": "fp32", "reduce_dtype": "fp32"}
        engine_config = FSDPEngineConfig(strategy=strategy, mixed_precision=precision, **settings)
    config = TrainingWorkerConfig(
        model_type=model_type,
        model_config=HFModelConfig(
            path=path, override_config={"attn_implementation": "eager"}, enable_gradient_checkpointing=False
        ),
        engine_config=engine_config,
        optimizer_config=FSDPOptimizerConfig(lr=1e-3, weight_decay=0.1, clip_grad=0.5, total_training_steps=100),
        checkpoint_config=CheckpointConfig(),
    )
    made = TinkerTrainingWorker(config=config)
    made.reset()
    return made


def jagged(rows):
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def batch(seed=0, **non_tensors):
    """What verl's PPO trainer hands to a worker, with the SFT trainer's loss mask beside it."""
    g = torch.Generator().manual_seed(seed)
    ids = [torch.randint(3, VOCAB - 16, (p + r,), generator=g) for p, r in LENGTHS]
    responses = [row[p:] for row, (p, _) in zip(ids, LENGTHS)]
    masks = [(torch.rand(r, generator=g) < 0.9).long() for _, r in LENGTHS]
    for mask in masks:
        mask[0] = 1
    normal = lambda scale, shift=0.0: jagged([torch.randn(r, generator=g) * scale + shift for _, r in LENGTHS])  # noqa: E731
    tensors = {
        "input_ids": jagged(ids),
        "position_ids": jagged([torch.arange(len(row)) for row in ids]),
        "prompts": jagged([row[:p] for row, (p, _) in zip(ids, LENGTHS)]),
        "responses": jagged(responses),
        "response_mask": jagged(masks),
        "loss_mask": jagged([torch.cat([torch.zeros(p, dtype=torch.long), m]) for m, (p, _) in zip(masks, LENGTHS)]),
        "old_log_probs": normal(0.3, -5.6),
        "ref_log_prob": normal(0.3, -5.6),
        "advantages": normal(1.0),
        "values": normal(0.3),
        "returns": normal(0.5),
    }
    settings = {"temperature": 1.0, "global_batch_size": len(LENGTHS), "pad_mode": "no_padding", **non_tensors}
    return tu.get_tensordict(tensor_dict=tensors, non_tensor_dict=settings)


def metrics_of(output):
    return tu.get(output, "metrics")


def values_of(metric):
    """A metric as numbers: verl gives a number, or a list of them or of its Metric objects, one a micro-batch."""
    entries = metric if isinstance(metric, (list, tuple)) else [metric]
    flat = []
    for entry in entries:
        if isinstance(entry, (list, tuple)):
            flat += values_of(entry)
        elif hasattr(entry, "values") and not isinstance(entry, torch.Tensor):
            flat += [float(value) for value in entry.values]
        else:
            flat.append(float(entry))
    return flat


def weights_of(made):
    tensors, adapter = made.engine.get_per_tensor_param()
    assert adapter is None
    return {name: tensor.detach().float().clone() for name, tensor in tensors}


def without_last(nested):
    """A statistic without the entry of each row's last token: verl's is that of whatever sequence came next."""
    return torch.cat([row[:-1] for row in nested.unbind()])


class Workers(unittest.TestCase):
    """Each test starts from the same weights, on both engines."""

    arch, model_type = "llama", "language_model"

    @classmethod
    def setUpClass(cls):
        temporary = tempfile.TemporaryDirectory()
        cls.addClassCleanup(temporary.cleanup)
        cls.folder = temporary.name
        initialize_global_process_group_ray()  # a no-op from the second time on
        tiny.make(cls.folder, cls.arch, value_head=cls.model_type == "value_model")

    def pair(self, **engine):
        path = os.path.join(self.folder, "model")
        theirs, ours = (worker(path, strategy, self.model_type, **engine) for strategy in ("fsdp2", "titanium"))
        self.addCleanup(ours.engine._client.close)
        return theirs, ours

    def assert_near(self, ours, theirs, tolerance, what):
        ours, theirs = torch.as_tensor(ours).double(), torch.as_tensor(theirs).double()
        self.assertEqual(ours.shape, theirs.shape, what)
        worst = ((ours - theirs).abs() / (1 + theirs.abs())).max().item()
        self.assertLessEqual(worst, tolerance, what)

    def assert_same_metrics(self, ours, theirs):
        ignored = ("perf/", "mfu")
        names = lambda metrics: sorted(name for name in metrics if not name.startswith(ignored))  # noqa: E731
        self.assertEqual(names(ours), names(theirs))
        for name in names(theirs):
            tolerance = 1e-5 if "grad_norm" in name else 5e-6
            self.assert_near(values_of(ours[name]), values_of(theirs[name]), tolerance, name)

    def assert_same_weights(self, ours, theirs, start):
        ours, theirs = weights_of(ours), weights_of(theirs)
        self.assertEqual(sorted(ours), sorted(theirs))
        moved = 0.0
        for name in theirs:
            self.assertEqual(ours[name].shape, theirs[name].shape, name)
            # Steps of Adam are as large as the rate whatever the gradient; where it is nearly 0 only its sign counts.
            off = (ours[name] - theirs[name]).abs()
            self.assertLess(off.mean().item(), 2e-6, name)
            moved = max(moved, (theirs[name] - start[name]).abs().max().item())
        self.assertGreater(moved, 5e-4)


class LanguageModel(Workers):
    def test_the_first_weights_are_those_of_the_folder(self):
        theirs, ours = self.pair()
        expected = weights_of(theirs)
        found = weights_of(ours)
        self.assertEqual(sorted(found), sorted(expected))
        for name in expected:
            self.assertTrue(torch.equal(found[name], expected[name]), name)

    def test_infer_batch(self):
        theirs, ours = self.pair()
        temperatures = torch.linspace(0.6, 1.4, len(LENGTHS))
        cases = [
            dict(temperature=1.0),
            dict(temperature=0.7, use_dynamic_bsz=False, micro_batch_size_per_gpu=2),
            dict(temperature=temperatures),
        ]
        for case in cases:
            flags = dict(calculate_entropy=True, calculate_sum_pi_squared=True, compute_loss=False)
            per_row = {key: value for key, value in case.items() if isinstance(value, torch.Tensor)}
            results = []
            for made in (theirs, ours):
                data = batch(**{**case, **flags, **{key: 1.0 for key in per_row}})
                for key, value in per_row.items():
                    data[key] = value
                results.append(made.infer_batch(data))
            for name in ("log_probs", "entropy", "sum_pi_squared"):
                expected, found = (tu.get(result, name) for result in results)
                self.assertEqual(found.offsets().tolist(), expected.offsets().tolist())
                self.assertEqual(found.dtype, torch.float32)
                self.assert_near(without_last(found), without_last(expected), 1e-5, f"{name}, {case}")

    def test_infer_batch_with_a_loss(self):
        results = []
        for made in self.pair():
            made.set_loss_fn(partial(sft_loss, config=None))
            results.append(metrics_of(made.infer_batch(batch())))
        self.assert_same_metrics(results[1], results[0])

    def test_train_batch_with_the_sft_loss(self):
        theirs, ours = self.pair()
        start = weights_of(theirs)
        for step in range(3):
            results = []
            for made in (theirs, ours):
                made.set_loss_fn(partial(sft_loss, config=None))
                results.append(metrics_of(made.train_batch(batch(step, update_lr_scheduler=True))))
            self.assert_same_metrics(results[1], results[0])
        self.assert_same_weights(ours, theirs, start)

    def test_the_engines_own_sft_loss_is_verls(self):
        path = os.path.join(self.folder, "model")
        results, weights = [], []
        for loss in (partial(sft_loss, config=None), lambda **arguments: sft_loss(config=None, **arguments)):
            made = worker(path, "titanium")
            self.addCleanup(made.engine._client.close)
            made.set_loss_fn(loss)
            results.append(metrics_of(made.train_batch(batch())))
            weights.append(weights_of(made))
        self.assert_same_metrics(results[0], results[1])
        for name in weights[0]:
            self.assertLess((weights[0][name] - weights[1][name]).abs().mean().item(), 1e-7, name)

    def ppo(self, made, **settings):
        actor = ActorConfig(
            strategy="fsdp2",
            rollout_n=1,
            ppo_micro_batch_size_per_gpu=4,
            entropy_coeff=0.01,
            use_kl_loss=True,
            kl_loss_coef=0.05,
            **settings,
        )
        made.set_loss_fn(partial(ppo_loss, config=actor))

    def test_an_update_with_the_ppo_loss_in_mini_batches(self):
        for mode in ("token-mean", "seq-mean-token-sum"):
            theirs, ours = self.pair()
            start = weights_of(theirs)
            results = []
            for made in (theirs, ours):
                self.ppo(made, loss_agg_mode=mode)
                data = batch(calculate_entropy=True, num_mini_batch=2, epochs=2, seed=3, dataloader_kwargs={"shuffle": True})
                tu.assign_non_tensor(data, global_batch_size=len(LENGTHS) // 2)
                results.append(metrics_of(made.train_mini_batch(data)))
            self.assertIn("actor/pg_loss", results[0])
            self.assert_same_metrics(results[1], results[0])
            self.assert_same_weights(ours, theirs, start)

    def test_forward_backward_and_optimizer_step_apart(self):
        theirs, ours = self.pair()
        start = weights_of(theirs)
        for override in (None, {"lr": 5e-4, "betas": (0.8, 0.99)}):
            outputs, norms = [], []
            for made in (theirs, ours):
                self.ppo(made)
                made.optimizer_zero_grad()
                outputs.append([made.forward_backward(batch(seed, calculate_entropy=True)) for seed in (1, 2)])
                norms.append(made.optimizer_step(override)["grad_norm"])
            for expected, found in zip(*outputs):
                self.assert_same_metrics(metrics_of(found), metrics_of(expected))
                for name in ("log_probs", "entropy"):
                    pair = without_last(tu.get(found, name)), without_last(tu.get(expected, name))
                    self.assert_near(*pair, 1e-5, name)
            self.assert_near(norms[1], norms[0], 1e-5, "grad_norm")
        self.assertEqual(ours.engine.optimizer.param_groups[0]["lr"], 5e-4)
        self.assert_same_weights(ours, theirs, start)

    def test_a_checkpoint_takes_a_worker_back(self):
        made = worker(os.path.join(self.folder, "model"), "titanium")
        self.addCleanup(made.engine._client.close)
        made.set_loss_fn(partial(sft_loss, config=None))
        made.train_batch(batch(0, update_lr_scheduler=True))
        path = os.path.join(self.folder, "checkpoints", "global_step_1")
        made.save_checkpoint(path, None, 1, 2)
        straight = metrics_of(made.train_batch(batch(1)))
        after = weights_of(made)
        made.load_checkpoint(None)  # nothing to load
        made.load_checkpoint(path)
        again = metrics_of(made.train_batch(batch(1)))
        self.assertEqual((again["loss"], again["grad_norm"]), (straight["loss"], straight["grad_norm"]))
        for name, tensor in weights_of(made).items():
            self.assertTrue(torch.equal(tensor, after[name]), name)

    def test_modes_nest_and_failures_leave_a_usable_engine(self):
        made = worker(os.path.join(self.folder, "model"), "titanium", param_offload=True, optimizer_offload=True)
        engine = made.engine
        self.addCleanup(engine._client.close)
        with engine.train_mode():
            with engine.train_mode(disable_auto_offload=True, zero_grad_on_exit=False):
                self.assertEqual(engine.mode, "train")
            with engine.eval_mode(disable_auto_offload=True):
                self.assertEqual(engine.mode, "eval")
            self.assertEqual(engine.mode, "train")
        self.assertIsNone(engine.mode)

        made.set_loss_fn(partial(sft_loss, config=None))
        expected = metrics_of(made.infer_batch(batch()))["loss"]
        bad = batch()
        bad["input_ids"].values()[3] = VOCAB + 5
        with self.assertRaisesRegex(titanium.BadData, str(VOCAB + 5)):
            made.train_batch(bad)
        moved = batch()
        moved["position_ids"].values()[20] += 1
        with self.assertRaisesRegex(titanium.BadData, "row 1"):
            made.train_batch(moved)

        def failing(model_output, data, dp_group=None):
            raise ZeroDivisionError("a loss of the user's own")

        made.set_loss_fn(failing)
        with self.assertRaisesRegex(ZeroDivisionError, "of the user's own"):
            made.train_batch(batch())
        self.assertIsNone(engine.mode)
        made.set_loss_fn(partial(sft_loss, config=None))
        self.assertEqual(metrics_of(made.infer_batch(batch()))["loss"], expected)

    def test_settings_that_would_change_a_result_are_refused(self):
        path = os.path.join(self.folder, "model")
        for settings, words in (
            (dict(tensor_parallel_size=2), "1 workers.*engine.tensor_parallel_size 2"),
            (dict(offload_policy=True), "offload_policy"),
            (dict(dtype="float16"), "float16"),
        ):
            with self.assertRaisesRegex(titanium.BadConfig, words):
                config = TitaniumEngineConfig(**{"dtype": "float32", **settings})
                engine_of(path, config)
        # Two workers must not train two models.
        with mock.patch("torch.distributed.get_world_size", return_value=2):
            with self.assertRaisesRegex(titanium.BadConfig, "2 workers.*engine.data_parallel_shard_size 1 x"):
                engine_of(path, TitaniumEngineConfig(dtype="float32"))


class TiedLanguageModel(Workers):
    arch = "qwen3"

    def test_train_batch(self):
        theirs, ours = self.pair()
        start = weights_of(theirs)
        self.assertIn("lm_head.weight", start)
        results = []
        for made in (theirs, ours):
            made.set_loss_fn(partial(sft_loss, config=None))
            results.append(metrics_of(made.train_batch(batch())))
        self.assert_same_metrics(results[1], results[0])
        self.assert_same_weights(ours, theirs, start)


class ValueModel(Workers):
    model_type = "value_model"

    def pair(self, **engine):
        # verl reads critics with flash_attention_2, whatever the config says; that has no CPU build.
        reader = transformers.AutoModelForTokenClassification
        read = reader.from_pretrained
        eager = lambda *args, **kwargs: read(*args, **{**kwargs, "attn_implementation": "eager"})  # noqa: E731
        with mock.patch.object(reader, "from_pretrained", eager):
            return super().pair(**engine)

    def test_values_and_an_update_with_the_value_loss(self):
        theirs, ours = self.pair()
        start = weights_of(theirs)
        expected, found = (tu.get(made.infer_batch(batch(compute_loss=False)), "values") for made in (theirs, ours))
        self.assertEqual(found.offsets().tolist(), expected.offsets().tolist())
        self.assert_near(found.values(), expected.values(), 1e-5, "values")
        critic = CriticConfig(strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=4, cliprange_value=0.2)
        results = []
        for made in (theirs, ours):
            made.set_loss_fn(partial(value_loss, config=critic))
            data = batch(num_mini_batch=2, seed=5)
            tu.assign_non_tensor(data, global_batch_size=len(LENGTHS) // 2)
            results.append(metrics_of(made.train_mini_batch(data)))
        self.assert_same_metrics(results[1], results[0])
        self.assert_same_weights(ours, theirs, start)


def engine_of(path, engine_config):
    from titanium.verl import TitaniumEngineWithLMHead

    return TitaniumEngineWithLMHead(
        model_config=HFModelConfig(path=path, override_config={"attn_implementation": "eager"}),
        engine_config=engine_config,
        optimizer_config=FSDPOptimizerConfig(),
        checkpoint_config=None,
    )


if __name__ == "__main__":
    unittest.main()

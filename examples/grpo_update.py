"""A GRPO update from Python, from given answers to new weights: grpo_update.py <Hugging Face folder>
The twin of grpo_update.cpp, through `titanium serve`; needs numpy alone.  $TITANIUM_BINARY is the command."""

import sys

import numpy as np
import titanium


def rollouts():
    """Stand-ins for a rollout engine and a reward: 2 prompts with 4 answers each, and a liking for small ids."""
    ids, mask, offsets = [], [], [0]
    for i in range(8):
        for t in range(12 + i):
            ids.append(10 + 7 * (i // 4) + t if t < 6 else (37 * i + 11 * t * t) % 200)
            mask.append(int(t >= 6))
        offsets.append(len(ids))
    batch = {"input_ids": np.array(ids), "loss_mask": np.array(mask), "offsets": np.array(offsets)}
    rows = [batch["input_ids"][b:e] for b, e in zip(offsets, offsets[1:])]
    return batch, np.array([float((row < 100).sum()) for row in rows]), np.arange(8) // 4


def grpo(rewards, group, batch):
    """Advantages: a reward's distance from the mean of its prompt's answers, in their standard deviations, at each token of the answer."""
    scores = np.zeros_like(rewards)
    for prompt in np.unique(group):
        own = rewards[group == prompt]
        scores[group == prompt] = (own - own.mean()) / (own.std(ddof=1) + 1e-6)
    return np.repeat(scores, np.diff(batch["offsets"])) * batch["loss_mask"]


def update(folder):
    config = {
        "model": {"path": folder},
        "engine": {"dtype": "float32", "max_token_len_per_gpu": 64},
        "optimizer": {"lr": 1e-4},
    }
    batch, rewards, group = rollouts()
    batch["temperature"] = 0.8  # of the rollouts: log-probs here and there are of the same distribution
    with titanium.spawn(config, arrays="numpy") as engine:
        engine.initialize()
        with engine.eval_mode():  # log-probs before the update; entry t of a row is about token t + 1
            old = engine.infer_batch(batch)["model_output"]["log_probs"]
        batch["columns"] = {
            "old_log_probs": old.by_token(),
            "advantages": grpo(rewards, group, batch),
        }
        before = {name: array.copy() for name, array in engine.get_per_tensor_param().tensors()}
        clipped = []
        for _ in range(3):
            with engine.train_mode():
                metrics = engine.train_batch(batch, {"name": "policy", "clip_ratio": 0.2})["metrics"]
            clipped.append(metrics["actor/pg_clipfrac"])
            print({name: round(value, 6) for name, value in metrics.items()}, "lr", engine.lr_scheduler_step())
        changed = 0  # to the rollout engine, in bf16
        for name, array in engine.get_per_tensor_param().tensors():
            changed += not np.array_equal(array, before[name])
    assert clipped[0] == 0, "the first update is on-policy"
    assert changed, "the rollout engine gets other weights than before"
    print(f"sent {len(before)} tensors, {changed} of them changed")


if len(sys.argv) != 2:
    sys.exit("usage: grpo_update.py <Hugging Face folder>")
update(sys.argv[1])

"""Makes smollm2.json: three PPO updates of SmolLM2 on given rollouts, by transformers and verl's formulas.

usage: make.py FOLDER_OF_SMOLLM2 IDS.json     (needs torch and transformers; IDS.json: a list of token ids of real text)

One mini-batch of eight sequences, three updates on it.  Rollout log-probs are those of the model before the first update plus a
fixed disturbance, so that ratios leave the clip range on both sides; the reference policy is the model before the first update.
loss = token-mean(dual-clip PPO) - 0.001 token-mean(entropy) + 0.001 token-mean(k3 with its clamps); AdamW on every weight,
clip to norm 1.
"""
import json
import math
import os
import sys

import torch
from transformers import AutoModelForCausalLM

HERE = os.path.dirname(os.path.abspath(__file__))
LR, BETAS, EPS, DECAY, MAX_NORM, STEPS = 1e-6, (0.9, 0.999), 1e-8, 0.01, 1.0, 3
LOW, HIGH, DUAL, ENTROPY, KL = 0.2, 0.2, 3.0, 0.001, 0.001
SHAPES = [(5, 40), (12, 9), (7, 61), (3, 1), (20, 33), (9, 17), (4, 50), (15, 25)]  # prompt, response


def log_probs(model, row, prompt, autocast):
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = model(input_ids=torch.tensor([row]), use_cache=False).logits[0, prompt - 1:-1]
    logp = logits.float().log_softmax(-1)
    taken = logp.gather(-1, torch.tensor(row[prompt:])[:, None])[:, 0]
    return taken, -(logp.exp() * logp).sum(-1)


def run(folder, rows, old, ref, advantages, autocast):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
    count = sum(len(a) for a in advantages)
    out = []
    for _ in range(STEPS):
        total, clipped, lower = 0.0, 0.0, 0.0
        for (prompt, _), row, o, r, a in zip(SHAPES, rows, old, ref, advantages):
            o, r, a = torch.tensor(o), torch.tensor(r), torch.tensor(a)
            l, entropy = log_probs(model, row, prompt, autocast)
            ratio = (l - o).clamp(-20, 20).exp()
            plain, cut = -a * ratio, -a * ratio.clamp(1 - LOW, 1 + HIGH)
            upper = torch.maximum(plain, cut)
            pg = torch.where(a < 0, torch.minimum(upper, -a * DUAL), upper)
            q = (r - l).clamp(-20, 20)
            kl = (q.exp() - q - 1).clamp(-10, 10)
            loss = (pg - ENTROPY * entropy + KL * kl).sum() / count
            loss.backward()
            total += loss.item()
            clipped += (cut > plain).sum().item()
            lower += ((upper > -a * DUAL) & (a < 0)).sum().item()
        # Summed in fp64: torch's own norm of 135 million squares in fp32 is off by 2e-5.
        norm = sum(p.grad.double().square().sum() for p in model.parameters()).sqrt()
        print("torch's norm is off by", torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item() / norm.item() - 1)
        optimizer.step()
        optimizer.zero_grad()
        out.append({"loss": total, "grad_norm": norm.item(), "clipfrac": clipped / count, "clipfrac_lower": lower / count})
    return out


def main(folder, ids_file):
    with open(ids_file) as f:
        ids = json.load(f)
    rows, at = [], 1000
    for prompt, response in SHAPES:
        rows.append(ids[at:at + prompt + response])
        at += prompt + response
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    with torch.no_grad():
        ref = [log_probs(model, row, prompt, False)[0].tolist() for (prompt, _), row in zip(SHAPES, rows)]
    del model
    old = [[v + 0.5 * math.sin(1.7 * t + i) ** 3 for t, v in enumerate(row)] for i, row in enumerate(ref)]
    old[2][5] -= 2.5  # ratios far above the dual clip
    old[5][3] -= 2.5
    advantages = [[1.5 * math.cos(0.9 * t + 2 * i) + (0.3 if i % 2 else -0.3) for t in range(len(row))] for i, row in enumerate(ref)]
    out = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY, "clip_grad": MAX_NORM, "clip_ratio": LOW, "clip_ratio_c": DUAL,
           "entropy_coeff": ENTROPY, "kl_loss_coef": KL, "prompt_lengths": [p for p, _ in SHAPES], "ids": rows,
           "old_log_probs": old, "ref_log_prob": ref, "advantages": advantages}
    for name, autocast in (("fp32", False), ("bf16_autocast", True)):
        out[name] = run(folder, rows, old, ref, advantages, autocast)
        print(name, out[name])
    with open(os.path.join(HERE, "smollm2.json"), "w") as f:
        json.dump(out, f)
        f.write("\n")


main(*sys.argv[1:])

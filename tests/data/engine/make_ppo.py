"""Three PPO updates of the tiny llama3 fixture by transformers and verl's formulas, as reference values.

    python make_ppo.py            # needs torch and transformers; writes ppo.json beside this file

Padded batch, plain log-softmax, torch.optim.AdamW: nothing of titanium takes part.  In float64 transformers still
computes norms and rope in float32, so these two are replaced there by their formulas.
"""
import json
import math
import pathlib

import torch
from transformers import AutoModelForCausalLM

HERE = pathlib.Path(__file__).parent
MODEL = HERE.parent / "models" / "llama3"
LOW, HIGH, DUAL, ENTROPY, KL, TEMPERATURE, CLIP = 0.2, 0.28, 3.0, 0.01, 0.05, 0.8, 1.0
LR, BETAS, EPS, DECAY, STEPS = 2e-4, (0.9, 0.999), 1e-8, 0.1, 3


def rms_norm(self, x):
    return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))


def rope(self, x, position_ids):
    """cos, sin [B, n, H] of llama3's scaled frequencies (Llama 3.1)."""
    c = json.loads((MODEL / "config.json").read_text())
    s = c["rope_scaling"]
    f = 1 / c["rope_theta"] ** (torch.arange(0, c["head_dim"], 2, dtype=torch.float64) / c["head_dim"])
    wave = 2 * math.pi / f
    old = s["original_max_position_embeddings"]
    smooth = (old / wave - s["low_freq_factor"]) / (s["high_freq_factor"] - s["low_freq_factor"])
    f = torch.where(smooth <= 0, f / s["factor"],
                    torch.where(smooth >= 1, f, (1 - smooth) * f / s["factor"] + smooth * f))
    angle = position_ids[..., None].double() * f
    angle = torch.cat([angle, angle], -1)
    return angle.cos(), angle.sin()


def load(dtype):
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=dtype, attn_implementation="sdpa")
    if dtype == torch.float64:
        for module in model.modules():
            if type(module).__name__ == "LlamaRMSNorm":
                module.forward = rms_norm.__get__(module)
            if type(module).__name__ == "LlamaRotaryEmbedding":
                module.forward = rope.__get__(module)
    return model


def stats(model, rows):
    """log-prob and entropy [B, n - 1] of the next token, rows right-padded."""
    width = max(len(row) for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    attend = torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
        attend[i, : len(row)] = 1
    z = model(ids, attention_mask=attend).logits[:, :-1] / TEMPERATURE
    logp = torch.log_softmax(z, -1)
    return logp.gather(-1, ids[:, 1:, None])[..., 0], -(logp.exp() * logp).sum(-1)


def given():
    g = torch.Generator().manual_seed(7)
    model = load(torch.float64)
    vocab = model.config.vocab_size
    rows, masks = [], []
    for prompt, response in [(3, 6), (7, 1), (2, 13), (5, 9), (1, 4), (4, 8)]:
        rows.append(torch.randint(0, vocab, (prompt + response,), generator=g).tolist())
        mask = [0] * prompt + [1] * response
        if response > 5:
            mask[prompt + 3] = 0  # a token that a tool wrote
        masks.append(mask)
    with torch.no_grad():
        logp, _ = stats(model, rows)
    data = {"ids": rows, "mask": masks, "old_log_probs": [], "ref_log_prob": [], "advantages": []}
    for i, row in enumerate(rows):
        n = len(row)
        own = torch.cat([torch.zeros(1), logp[i, : n - 1].float()])
        noise = lambda size: torch.randn(n, generator=g) * size
        advantage = torch.randn(1, generator=g)
        data["old_log_probs"].append((own + noise(0.15)).tolist())
        data["ref_log_prob"].append((own + noise(0.3)).tolist())
        data["advantages"].append((advantage + noise(0.2)).tolist())
    return data


def pad(rows, dtype):
    width = max(len(row) for row in rows)
    return torch.tensor([list(row) + [0] * (width - len(row)) for row in rows], dtype=dtype)[:, 1:]


def run(data, dtype):
    model = load(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
    m = pad(data["mask"], dtype)
    old, ref, adv = (pad(data[k], dtype) for k in ("old_log_probs", "ref_log_prob", "advantages"))
    mean = lambda x: (x * m).sum() / m.sum()
    steps = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        logp, entropy = stats(model, data["ids"])
        d = torch.clamp(logp - old, -20, 20)
        ratio = d.exp()
        l1, l2 = -adv * ratio, -adv * torch.clamp(ratio, 1 - LOW, 1 + HIGH)
        clipped = torch.maximum(l1, l2)
        dual = -adv * DUAL
        pg = torch.where(adv < 0, torch.minimum(dual, clipped), clipped)
        q = torch.clamp(ref - logp, -20, 20)
        kl = torch.clamp(q.exp() - q - 1, -10, 10)
        loss = mean(pg) - ENTROPY * mean(entropy) + KL * mean(kl)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        steps.append({
            "loss": loss.item(), "grad_norm": norm.item(), "pg_loss": mean(pg).item(),
            "pg_clipfrac": mean((l2 > l1).to(dtype)).item(),
            "pg_clipfrac_lower": mean(((clipped > dual) & (adv < 0)).to(dtype)).item(),
            "ppo_kl": mean(-d).item(), "entropy": mean(entropy).item(), "kl_loss": mean(kl).item(),
        })
        optimizer.step()
    with torch.no_grad():
        logp, _ = stats(model, data["ids"])
    final = [logp[i, : len(row) - 1].double().tolist() for i, row in enumerate(data["ids"])]
    weights = {name: p.double().abs().sum().item() for name, p in model.named_parameters()}
    return {"steps": steps, "log_probs": final, "abs_sums": weights}


data = given()
out = {
    "settings": {"clip_low": LOW, "clip_high": HIGH, "clip_dual": DUAL, "entropy_coeff": ENTROPY, "kl_coef": KL,
                 "temperature": TEMPERATURE, "clip_grad": CLIP, "lr": LR, "betas": BETAS, "eps": EPS,
                 "weight_decay": DECAY},
    "given": data,
    "float64": run(data, torch.float64),
    "float32": run(data, torch.float32),
}
(HERE / "ppo.json").write_text(json.dumps(out) + "\n")

"""Makes expected.json: log-probs of transformers far beyond the original context, for every rope scaling.

usage: make.py ../models/llama3    (needs torch and transformers)
"""
import json
import os
import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM

TOKENS, TAIL = 9002, 48
HERE = os.path.dirname(os.path.abspath(__file__))
VARIANTS = {
    "default": None,
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048},
    "yarn_without_original": {"rope_type": "yarn", "factor": 4.0},
}


def main(folder):
    ids = torch.tensor([[(i * i * 31 + 17 * i + 5) % 320 for i in range(TOKENS)]])
    out = {"tokens": TOKENS, "tail": TAIL, "max_position_embeddings": 9216, "variants": {}}
    for name, scaling in VARIANTS.items():
        config = AutoConfig.from_pretrained(folder)
        config.max_position_embeddings = 9216
        config.rope_parameters = {"rope_theta": 10000.0, "rope_type": "default", **(scaling or {})}
        model = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float64, attn_implementation="sdpa")
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False, logits_to_keep=TAIL + 1).logits[0, :-1]
        logprob = logits.double().log_softmax(-1).gather(-1, ids[0, -TAIL:, None])[:, 0]
        out["variants"][name] = {"rope_scaling": scaling, "logprob": [round(v, 9) for v in logprob.tolist()]}
    with open(os.path.join(HERE, "expected.json"), "w") as f:
        json.dump(out, f, indent=1)
        f.write("\n")


main(sys.argv[1])

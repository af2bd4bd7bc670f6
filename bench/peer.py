"""The peer of bench/run: transformers eager on CPU, sdpa attention, fused AdamW, its default settings.

peer.py train|score|decode --model DIR --ids FILE --dtype bf16|fp32 --docs N --length L --steps K
prints one JSON line: {"seconds": [per step], "tokens": per step of all ranks, "peak_rss": bytes}
As a rank of several (RANK, WORLD_SIZE, ... are set), train is FSDP2 over gloo, the documents cut over the ranks.
"""
import argparse
import json
import os
import resource
import time

import torch
import transformers


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=["train", "score", "decode"])
    parser.add_argument("--model", required=True)
    parser.add_argument("--ids", required=True)
    parser.add_argument("--dtype", choices=["bf16", "fp32"], required=True)
    parser.add_argument("--docs", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    bf16 = args.dtype == "bf16"
    ids = torch.tensor(json.load(open(args.ids)))
    batch = ids[: args.docs * args.length].view(args.docs, args.length)
    # Training: fp32 masters, bf16 by autocast.  Decoding: weights in the compute dtype, as one serves them.
    stored = torch.bfloat16 if bf16 and args.mode == "decode" else torch.float32
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=stored, attn_implementation="sdpa")
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:  # FSDP2: gathers in bf16, reductions in fp32, as torchtitan sets it up
        import torch.distributed as dist
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        dist.init_process_group("gloo")
        batch = batch.chunk(world)[dist.get_rank()]
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if bf16 else torch.float32, reduce_dtype=torch.float32)
        for layer in model.model.layers:
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        bf16 = False  # by the policy, not by autocast
    autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16 and args.mode != "decode")
    seconds, tokens, checks = [], batch.numel() * world, []

    if args.mode == "train":
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        for _ in range(args.steps):
            begin = time.perf_counter()
            with autocast:
                loss = model(input_ids=batch, labels=batch, use_cache=False).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            checks.append(loss.item())
            seconds.append(time.perf_counter() - begin)
    elif args.mode == "score":
        # Log-prob and entropy from logits, with verl's arithmetic (logprobs_from_logits, entropy_from_logits).
        model.eval()
        for _ in range(args.steps):
            begin = time.perf_counter()
            with torch.no_grad(), autocast:
                logits = model(input_ids=batch, use_cache=False).logits.float()
            with torch.no_grad():
                logits, labels = logits[:, :-1], batch[:, 1:]
                logprob = torch.gather(logits, -1, labels.unsqueeze(-1)).squeeze(-1) - torch.logsumexp(logits, -1)
                entropy = torch.logsumexp(logits, -1) - (torch.softmax(logits, -1) * logits).sum(-1)
            checks.append([logprob.mean().item(), entropy.mean().item()])
            seconds.append(time.perf_counter() - begin)
    else:
        model.eval()
        prompt = batch[:, : args.length // 2]
        new = args.length - prompt.shape[1]
        tokens = args.docs * new
        for _ in range(args.steps):
            begin = time.perf_counter()
            with torch.no_grad():
                out = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new, min_new_tokens=new,
                                     do_sample=False, pad_token_id=0)
            checks.append(out[0, -1].item())
            seconds.append(time.perf_counter() - begin)
    if world > 1:
        dist.barrier()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"seconds": seconds, "tokens": tokens, "peak_rss": peak, "checks": checks}))


main()

"""A random model of a few kilobytes with a tokenizer, and chats to train it on: made on the spot, nothing is downloaded."""

import os
import random
import socket


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def make_tokenizer(path):
    """One token a byte, and the three special ones of a chat."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
    vocab = {token: i for i, token in enumerate(special + sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|im_end|>", bos_token="<|im_start|>"
    )
    fast.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    fast.save_pretrained(path)
    return len(vocab)


def make_model(path, arch, vocab, seed=7, value_head=False):
    import torch
    import transformers

    torch.manual_seed(seed)
    sizes = dict(
        vocab_size=vocab,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.05,
    )
    if arch == "llama":
        config = transformers.LlamaConfig(tie_word_embeddings=False, **sizes)
    elif arch == "qwen3":
        config = transformers.Qwen3Config(head_dim=16, tie_word_embeddings=True, **sizes)
    else:
        raise ValueError(f"no tiny model for {arch}")
    if value_head:
        config.num_labels = 1
        model = transformers.AutoModelForTokenClassification.from_config(config)
    else:
        model = transformers.AutoModelForCausalLM.from_config(config)
    model.float().save_pretrained(path, safe_serialization=True)


def make_chats(path, count, seed):
    import pyarrow
    import pyarrow.parquet

    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        a, b = rng.randrange(1000), rng.randrange(1000)
        words = " ".join(rng.choice("alpha beta gamma delta".split()) for _ in range(rng.randrange(1, 9)))
        rows.append(
            [
                {"role": "user", "content": f"{words} {a}+{b}=?"},
                {"role": "assistant", "content": f"{a + b} {words}"},
            ]
        )
    pyarrow.parquet.write_table(pyarrow.table({"messages": rows}), path)


def make(folder, arch="llama", value_head=False):
    """folder/model, folder/train.parquet (96 chats), folder/val.parquet (16)."""
    model = os.path.join(folder, "model")
    os.makedirs(model, exist_ok=True)
    tokens = make_tokenizer(model)
    make_model(model, arch, (tokens + 15) // 16 * 16, value_head=value_head)
    make_chats(os.path.join(folder, "train.parquet"), 96, 7)
    make_chats(os.path.join(folder, "val.parquet"), 16, 8)
    return folder


if __name__ == "__main__":
    import sys

    make(*sys.argv[1:])

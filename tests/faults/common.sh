# Sourced by the tests of whole runs.  $1 is the titanium command, $2 the source folder.
set -euo pipefail
titanium=$1
source_dir=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Token ids of uneven lengths for the fixtures' vocabulary of 320: real runs on made-up tokens, to be fast.
make_ids() {  # file records
  awk -v n="$2" 'BEGIN { srand(7); for (r = 0; r < n; ++r) { len = 3 + int(rand() * 30); printf "{\"input_ids\": ["
    for (i = 0; i < len; ++i) printf "%s%d", (i ? ", " : ""), int(rand() * 320); print "]}" } }' >"$1"
}
make_ids "$work/ids.jsonl" 200
config=(--model.path="$source_dir/tests/data/models/qwen3_tied" --data.path="$work/ids.jsonl" --training.seq_len=64
  --training.global_batch_size=6 --training.max_tokens_per_microbatch=80 --optimizer.lr=1e-3 --lr_scheduler.warmup_steps=3
  --training.mixed_precision_param=float32 --checkpoint.export_dtype=float32 --training.threads=1 --data.validation_split=0.1 --validator.freq=10 --metrics.log_freq=1000)
fail() { echo "FAIL: $*" >&2; exit 1; }
weights_of() { sha256sum <"$1/hf/model.safetensors" | cut -d' ' -f1; }

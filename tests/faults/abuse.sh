#!/usr/bin/env bash
# What nobody should do and somebody will: files of the wrong kind, numbers far too large, full disks, weights that are not numbers.
# Each ends soon, with a message that names the culprit, and without the word Bug.
. "$(dirname "$0")/common.sh"
models=$source_dir/tests/data/models

expect() {  # exit status, text in the output, then the command
  local status=$1 text=$2; shift 2
  local got=0
  timeout 60 "$@" >"$work/out" 2>&1 </dev/null || got=$?
  [ $got = "$status" ] || { tail -n 5 "$work/out"; fail "status $got, not $status: $*"; }
  grep -qF -- "$text" "$work/out" || { tail -n 5 "$work/out"; fail "no '$text' in the output of: $*"; }
  ! grep -q "Bug:" "$work/out" || { tail -n 5 "$work/out"; fail "a bug: $*"; }
}
copy() { cp -r "$models/$1" "$work/$2"; chmod -R u+w "$work/$2"; }
train=("$titanium" train "${config[@]}" --training.steps=2 --lr_scheduler.warmup_steps=1 --data.validation_split=0)
config_status=2 data_status=3 checkpoint_status=4 no_resources=71

# A model with a tokenizer, of random weights.
mkdir "$work/random"
sed 's/"vocab_size": 320/"vocab_size": 49152/' "$models/llama_tied/config.json" >"$work/random/config.json"
cp "$source_dir"/tests/data/tokenizer/{tokenizer.json,tokenizer_config.json,chat_template.jinja} "$work/random"
echo '{"text": "Never do this."}' >"$work/text.jsonl"
expect 0 "model written to" "${train[@]}" --model.path="$work/random" --data.path="$work/text.jsonl" --dump_folder="$work/made" \
  --training.steps=1 --training.global_batch_size=1 --checkpoint.initial_load_in_hf=false --checkpoint.enable=false
model=$work/made/hf

# Named pipes that nobody writes to.
for file in config.json tokenizer.json tokenizer_config.json generation_config.json chat_template.jinja; do
  cp -r "$model" "$work/piped"; rm -f "$work/piped/$file"; mkfifo "$work/piped/$file"
  expect $config_status "$file: is not a regular file" "$titanium" info "$work/piped"
  rm -r "$work/piped"
done
mkfifo "$work/run.toml"
expect $config_status "run.toml: is not a regular file" "$titanium" train "$work/run.toml"

# Empty names.
expect $config_status "dir" "$titanium" score "" "$work/ids.jsonl"
expect $config_status "--output" "$titanium" score "$models/qwen3_tied" "$work/ids.jsonl" -o ""

expect $config_status "--prompt ''" "$titanium" generate "$model" -p ""

# Numbers that fit 64 bits but no machine.
huge=9223372036854775807
for key in training.threads training.global_batch_size training.max_tokens_per_microbatch training.seq_len data.epochs; do
  expect $config_status "$key" "${train[@]}" --$key=$huge --dump_folder="$work/huge"
done
expect $config_status "--max-tokens" "$titanium" score "$models/qwen3_tied" "$work/ids.jsonl" --max-tokens $huge
expect 0 "logprob_sum" "$titanium" score "$models/qwen3_tied" "$work/ids.jsonl" --max-tokens 1000000000
expect $config_status "--micro-batches" "$titanium" plan "$work/run.toml" --micro-batches 1000000000
expect $no_resources "memory" bash -c 'ulimit -v 6000000; exec "$@"' - "$titanium" generate "$model" -p hi -n 1000000000

# Weights that are not numbers.
copy qwen3_tied nan; size=$(stat -c %s "$work/nan/model.safetensors")
printf '\xff\xff\xff\xff' | dd of="$work/nan/model.safetensors" bs=1 seek=$((size - 4)) conv=notrunc 2>/dev/null
expect $data_status "record 0, token" "$titanium" score "$work/nan" "$work/ids.jsonl"
expect 1 "FAIL greedy ids" "$titanium" check "$work/nan"

# Files beside the weights that say nothing.
for meta in '{}' '[]' '{"tolerances": {"logprob_atol": "x"}}'; do
  rm -rf "$work/meta"; copy qwen3_tied meta; echo "$meta" >"$work/meta/meta.json"
  expect $config_status "meta.json" "$titanium" check "$work/meta"
done
copy qwen3_tied index; rm "$work/index/model.safetensors"; echo '{"weight_map": {}}' >"$work/index/model.safetensors.index.json"
expect $checkpoint_status "index.json: weight_map names no tensor" "$titanium" score "$work/index" "$work/ids.jsonl"

# A log that cannot be written is no reason to fail.
"$titanium" score "$models/qwen3_tied" "$work/ids.jsonl" >"$work/scores" 2>/dev/full || fail "score without room for its log"
[ "$(wc -l <"$work/scores")" = 200 ] || fail "score without room for its log wrote $(wc -l <"$work/scores") lines"

# Metrics on a full disk: a warning, and whole lines only.
if [ "$(id -u)" = 0 ] && mkdir "$work/small" && mount -t tmpfs -o size=64k tmpfs "$work/small" 2>/dev/null; then
  trap 'umount "$work/small"; rm -rf "$work"' EXIT
  head -c 56k /dev/zero >"$work/small/fill"
  expect 0 "could not be written" "${train[@]}" --training.steps=60 --checkpoint.enable=false --checkpoint.last_save_in_hf=false --dump_folder="$work/small/run"
  ! grep -qv '^{.*}$' "$work/small/run/metrics.jsonl" || fail "a part of a line: $(tail -n 1 "$work/small/run/metrics.jsonl")"
else
  echo "full disk: not run, mounting a tmpfs is not permitted here (the unit test of report covers the writer)"
fi
echo ok

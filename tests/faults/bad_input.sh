#!/usr/bin/env bash
# Bad input: each ends with its kind of error, a message that names the culprit, and nothing lost.
. "$(dirname "$0")/common.sh"
models=$source_dir/tests/data/models

expect() {  # exit status, text in the message, then the command
  local status=$1 text=$2; shift 2
  local got=0
  "$titanium" "$@" >"$work/out" 2>&1 || got=$?
  [ $got = "$status" ] || { tail -n 5 "$work/out"; fail "status $got, not $status: $*"; }
  grep -qF -- "$text" "$work/out" || { tail -n 5 "$work/out"; fail "no '$text' in the message of: $*"; }
}
copy() { cp -r "$models/qwen3_tied" "$work/$1"; chmod -R u+w "$work/$1"; }
train=(train "${config[@]}" --training.steps=2 --lr_scheduler.warmup_steps=1 --dump_folder="$work/run")
config_status=2 data_status=3 checkpoint_status=4

# Config.
: >"$work/empty.toml"
expect $config_status "nosuch.toml" train "$work/nosuch.toml"
printf '[training]\nstepz = 3\n' >"$work/typo.toml"
expect $config_status "stepz" train "$work/typo.toml"
expect $config_status "steps" train "$work/typo.toml"
expect $config_status "typo.toml:2" train "$work/typo.toml"
expect $config_status "optimizer" "${train[@]}" --optimizer.lr=-1
expect $config_status "model.path" train --data.path="$work/ids.jsonl"
expect $config_status "tensor_parallel_degree" "${train[@]}" --parallelism.tensor_parallel_degree=2
printf 'a = [[[' >"$work/broken.toml"
expect $config_status "broken.toml:1" train "$work/broken.toml"
expect $config_status "sideways" sideways
expect $config_status "a command is expected; known: train, score"
expect $config_status "in one word" "${train[@]}" --training.steps 2
expect $config_status "training.threads" "${train[@]}" --training.threads=100000
expect $config_status "selective_ac_option" "${train[@]}" --activation_checkpoint.selective_ac_option=2147483648
expect $config_status "max_tokens_per_microbatch" "${train[@]}" --training.max_tokens_per_microbatch=9223372036854775807
expect $config_status "more than 1000 times the" "${train[@]}" --training.global_batch_size=1000000000
expect $config_status "more than 1000 times the" "${train[@]}" --training.global_batch_size=-1 --training.global_batch_tokens=1000000000
expect $config_status "checkpoint.resume = require, checkpoint.enable = false" "${train[@]}" --checkpoint.resume=require --checkpoint.enable=false
expect $config_status "nosuch.jinja" "${train[@]}" --data.chat_template="$work/nosuch.jinja"  # the fixture has no tokenizer
expect $config_status "lr_scheduler.total_steps = 3, data.epochs = 1 gives" train "${config[@]}" --dump_folder="$work/run" --lr_scheduler.total_steps=3
expect $config_status "model.path is missing" plan "$work/empty.toml"
copy odd; sed -i 's/"hidden_act": "silu"/"hidden_act": "relu"/' "$work/odd/config.json"
expect $config_status "relu" "${train[@]}" --model.path="$work/odd"
copy family; sed -i 's/"model_type": "qwen3"/"model_type": "gpt2"/' "$work/family/config.json"
expect $config_status "gpt2" info "$work/family"
copy stop; sed -i 's/"eos_token_id": null/"eos_token_id": 320/' "$work/stop/config.json"
expect $config_status "below vocab_size = 320" info "$work/stop"

# Folders that are not there.
( cd "$work"
  for command in "info nosuch" "check nosuch" "score nosuch ids.jsonl" "generate nosuch -p a" "train --data.path=ids.jsonl --model.path=nosuch"; do
    expect $config_status "nosuch: there is no such folder" $command
  done
  expect $config_status "titanium reads local folders" generate nosuch-org/name -p a
  expect $config_status "hf download nosuch-org/name --local-dir name" "${train[@]}" --model.path=nosuch-org/name
  [ ! -e nosuch-org ] && [ ! -e outputs ] || fail "a refused folder was made"
)
copy unchecked; rm "$work/unchecked/expected.safetensors"
expect $config_status "check compares with reference values" check "$work/unchecked"

# Weights.
copy cut; truncate -s -1 "$work/cut/model.safetensors"
expect $checkpoint_status "cut/model.safetensors" "${train[@]}" --model.path="$work/cut"
copy longer; printf '12345678' >>"$work/longer/model.safetensors"
expect $checkpoint_status "longer/model.safetensors" "${train[@]}" --model.path="$work/longer"
copy shape; sed -i 's/"intermediate_size": 112/"intermediate_size": 128/' "$work/shape/config.json"
expect $checkpoint_status "mlp.gate_proj.weight" "${train[@]}" --model.path="$work/shape"
copy layers; sed -i 's/"num_hidden_layers": 2/"num_hidden_layers": 3/; s/"layer_types": \[/"layer_types": ["full_attention", /' "$work/layers/config.json"
expect $checkpoint_status "model.layers.2." "${train[@]}" --model.path="$work/layers"
copy none; rm "$work/none/model.safetensors"
expect $checkpoint_status "none" "${train[@]}" --model.path="$work/none"
# Weights are looked at before a long data set is read.
expect $checkpoint_status "cut/model.safetensors" "${train[@]}" --model.path="$work/cut" --data.path="$work/nosuch.jsonl"
[ ! -e "$work/run" ] || [ -z "$(ls -A "$work/run")" ] || fail "a refused run left something: $(ls "$work/run")"

# GGUF.
head -c 1000 /dev/urandom >"$work/noise.gguf"
expect $checkpoint_status "noise.gguf" convert "$work/noise.gguf" "$work/from_gguf"
[ ! -e "$work/from_gguf" ] || fail "a refused conversion left its folder"

# Data.
: >"$work/empty.jsonl"
expect $data_status "empty.jsonl" "${train[@]}" --data.path="$work/empty.jsonl"
expect $data_status "nosuch.jsonl" "${train[@]}" --data.path="$work/nosuch.jsonl"
{ head -n 3 "$work/ids.jsonl"; echo '{"input_ids": [1, 2'; } >"$work/bad.jsonl"
expect $data_status "bad.jsonl:4" "${train[@]}" --data.path="$work/bad.jsonl"
{ head -n 3 "$work/ids.jsonl"; echo '{"input_ids": [1, 320]}'; } >"$work/vocab.jsonl"
expect $data_status "vocab.jsonl:4" "${train[@]}" --data.path="$work/vocab.jsonl"
awk 'BEGIN { printf "{\"input_ids\": ["; for (i = 0; i < 65; ++i) printf "%s7", (i ? ", " : ""); print "]}" }' >"$work/long.jsonl"
expect $data_status "training.seq_len" "${train[@]}" --data.path="$work/long.jsonl"
expect $config_status "max_tokens_per_microbatch" "${train[@]}" --training.max_tokens_per_microbatch=32
echo '{"text": "hello"}' >"$work/text.jsonl"  # the fixture has no tokenizer
expect $config_status "tokenizer" "${train[@]}" --data.path="$work/text.jsonl"
cp "$work/bad.jsonl" "$work/skipped.jsonl"
expect 0 "skipped.jsonl:4" "${train[@]}" --data.path="$work/skipped.jsonl" --data.on_bad_record=skip --training.global_batch_size=2 \
  --data.validation_split=0 \
  --dump_folder="$work/skip_run"

# Nothing to train on: loss 0, weights as they were (but for decay), every number finite.
sed -E 's/\]\}/], "loss_mask": []}/' "$work/ids.jsonl" | awk '{ n = gsub(/,/, ","); m = ""; ids = n; for (i = 0; i < ids; ++i) m = m (i ? ", " : "") "0"; sub(/"loss_mask": \[\]/, "\"loss_mask\": [" m "]"); print }' >"$work/masked.jsonl"
expect 0 "no token of the global batch has loss" "${train[@]}" --data.path="$work/masked.jsonl" --dump_folder="$work/masked_run"
grep -q "200 of 200 records, 0 of [0-9]* tokens have loss" "$work/out" || fail "the log does not say that no token has loss: $(grep "have loss" "$work/out")"
grep -q '"loss": *0.0' "$work/masked_run/metrics.jsonl" || fail "loss is not 0: $(head -n 1 "$work/masked_run/metrics.jsonl")"
! grep -qi nan "$work/masked_run/metrics.jsonl" || fail "NaN in the metrics of an all-masked run"

# Folders that are not this run's: nothing is trained, nothing in them changes.
copy mine; echo keep >"$work/mine/NOTES.md"; tar -C "$work" -cf "$work/mine.tar" mine
unchanged() { tar -C "$work" -df "$work/$1.tar" >/dev/null || fail "$1 has changed"; }
expect $config_status "model.path" "${train[@]}" --model.path="$work/mine" --dump_folder="$work" --checkpoint.export_folder=mine
expect $config_status "initial_load_path" "${train[@]}" --checkpoint.initial_load_path="$work/x/../mine/" --dump_folder="$work" --checkpoint.export_folder=mine
expect $config_status "was not written by this run" "${train[@]}" --dump_folder="$work" --checkpoint.export_folder=mine
unchanged mine
expect $config_status "export_folder" "${train[@]}" --checkpoint.export_folder=checkpoint
expect $config_status "without .." "${train[@]}" --checkpoint.folder=../escape
expect 0 "model written to" "${train[@]}" --dump_folder="$work/again"
expect 0 "model written to" "${train[@]}" --dump_folder="$work/again" --training.steps=3
echo keep >"$work/again/hf/notes.txt"; tar -C "$work" -cf "$work/again.tar" again
expect $config_status "notes.txt" "${train[@]}" --dump_folder="$work/again" --training.steps=5
unchanged again
[ ! -e "$work/again/.lock" ] || fail "a run that has ended left its lock"

# Two runs in one folder.
setsid "$titanium" "${train[@]}" --training.steps=100000 --dump_folder="$work/locked" 2>/dev/null & first=$!
for _ in $(seq 200); do [ -s "$work/locked/metrics.jsonl" ] && break; sleep 0.05; done
expect $config_status "another run (process $first)" "${train[@]}" --dump_folder="$work/locked"
kill -9 $first; wait $first 2>/dev/null || true
expect 0 "" "${train[@]}" --dump_folder="$work/locked" --checkpoint.enable=false  # the lock went with its owner
[ "$(wc -l <"$work/locked/metrics.jsonl.1")" -gt 1 ] || fail "the metrics of the run before are lost"
[ "$(grep -c '"loss"' "$work/locked/metrics.jsonl")" = 2 ] || fail "the metrics hold other runs' steps"

# Weights that an update has made infinite are not saved or exported.
expect $data_status "infinite or NaN" "${train[@]}" --optimizer.lr=1e308 --training.steps=5 --dump_folder="$work/infinite"
[ ! -e "$work/infinite/hf" ] && [ ! -e "$work/infinite/checkpoint" ] || fail "infinite weights were written"

# Without standard error the log goes nowhere, not into a file.
"$titanium" "${train[@]}" --dump_folder="$work/silent" 2>&- || fail "a run without standard error"
! grep -qv '^{"step"' "$work/silent/metrics.jsonl" || fail "the log is in the metrics: $(head -n 3 "$work/silent/metrics.jsonl")"

# A validation's batches hold what a step's hold, by records or by tokens.
validation() { grep -o '"validation_loss": *[0-9.]*' "$work/$1/metrics.jsonl" | head -n 1; }
by_tokens=(--training.global_batch_size=-1 --training.global_batch_tokens=5000)
expect 0 "" "${train[@]}" --training.steps=1 --dump_folder="$work/all_records"
expect 0 "" "${train[@]}" --training.steps=1 --dump_folder="$work/one_batch" "${by_tokens[@]}" --validator.steps=1
[ "$(validation all_records)" = "$(validation one_batch)" ] || fail "one batch of more tokens than there are is not all: $(validation one_batch)"
expect 0 "" "${train[@]}" --training.steps=1 --dump_folder="$work/small_batch" "${by_tokens[@]/5000/100}" --validator.steps=1
[ "$(validation all_records)" != "$(validation small_batch)" ] || fail "one batch of 100 tokens is the whole validation set"

# A checkpoint that does not fit.
"$titanium" "${train[@]}" --dump_folder="$work/first" 2>/dev/null
expect $config_status "seed" "${train[@]}" --dump_folder="$work/first" --training.seed=43 --training.steps=4
sed 's/, /,/g' "$work/ids.jsonl" >"$work/dense.jsonl"  # the same records, another validation split
expect $config_status "data.path: the records are not those" "${train[@]}" --dump_folder="$work/first" --data.path="$work/dense.jsonl" --training.steps=4
expect $config_status "past the end" "${train[@]}" --dump_folder="$work/first" --training.steps=1
cp -r "$work/first" "$work/changed"
expect 0 "optimizer.lr = 0.002; it was 0.001 when this checkpoint was saved" "${train[@]}" --dump_folder="$work/changed" --optimizer.lr=2e-3 --training.steps=3
copy elsewhere; cp -r "$work/first" "$work/used"
expect 0 "model.path = \"$work/elsewhere\" does not give this run its weights" "${train[@]}" --dump_folder="$work/used" --model.path="$work/elsewhere" --training.steps=3
grep -q "give another dump_folder than $work/used" "$work/out" || fail "no word of another dump_folder"
expect 0 "the run was complete" "${train[@]}" --dump_folder="$work/used" --model.path="$work/elsewhere" --training.steps=3
! grep -q "does not give" "$work/out" || fail "a warning without a change"
expect $checkpoint_status "was it saved of another model?" "${train[@]}" --dump_folder="$work/first" --model.path="$models/llama3" --training.steps=4
cp -r "$work/first" "$work/damaged"; echo '{' >"$work/damaged/checkpoint/step-2/manifest.json"
expect $checkpoint_status "does not start anew" "${train[@]}" --dump_folder="$work/damaged" --training.steps=4
expect 0 "" "${train[@]}" --dump_folder="$work/first" --checkpoint.load_step=2 --training.steps=3
expect $config_status "also holds step 3" "${train[@]}" --dump_folder="$work/first" --checkpoint.load_step=2 --training.steps=4
rm -r "$work/first/checkpoint/step-3"
printf 'x' | dd of="$(ls "$work"/first/checkpoint/step-2/*.safetensors | head -n 1)" bs=1 seek=2000 conv=notrunc 2>/dev/null
expect $checkpoint_status "step-2" "${train[@]}" --dump_folder="$work/first" --training.steps=4

# A full disk: the save fails with its path and reason, and the older checkpoint still loads.
if [ "$(id -u)" = 0 ] && mkdir "$work/small" && mount -t tmpfs -o size=3m tmpfs "$work/small" 2>/dev/null; then
  trap 'umount "$work/small"; rm -rf "$work"' EXIT
  "$titanium" "${train[@]}" --dump_folder="$work/small/run" --checkpoint.last_save_in_hf=false 2>/dev/null || fail "the first save on the small disk"
  head -c 900k /dev/zero >"$work/small/fill"
  expect $checkpoint_status "No space left" "${train[@]}" --dump_folder="$work/small/run" --training.steps=6 --checkpoint.last_save_in_hf=false
  rm "$work/small/fill"
  expect 0 "resumed" "${train[@]}" --dump_folder="$work/small/run" --training.steps=3 --checkpoint.last_save_in_hf=false
else
  echo "full disk: not run, mounting a tmpfs is not permitted here (the unit test of weights covers the writer)"
fi
echo ok

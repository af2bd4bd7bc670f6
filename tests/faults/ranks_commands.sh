#!/usr/bin/env bash
# score and generate on ranks: what one process gives, in the order of the input, written once; errors are one on all ranks.
. "$(dirname "$0")/common.sh"
model=$source_dir/tests/data/models/qwen3_tied
launch() { local n=$1; shift; $titanium launch -n "$n" "$@" 2>"$work/log" || { cat "$work/log"; fail "launch -n $n $*"; }; }
numbers() { tr -c '0-9.e\n-' ' ' <"$1"; }
same() {  # a b
  paste -d ' ' <(numbers "$1") <(numbers "$2") | awk '
    { n = NF / 2; if (NF % 2) bad = 1; for (i = 1; i <= n; ++i) { d = $i - $(i + n); if (d < 0) d = -d; s = $i < 0 ? -$i : $i; if (d > 1e-5 * (s > 1 ? s : 1)) bad = 1 } }
    END { exit bad || NR == 0 }'
}

# Records of one token, too.
printf '{"input_ids": [5]}\n{"input_ids": [7, 8]}\n' >>"$work/ids.jsonl"
for dtype in float32 float64; do
  $titanium score "$model" "$work/ids.jsonl" --dtype $dtype --max-tokens 100 -o "$work/one.$dtype"
  [ "$(wc -l <"$work/one.$dtype")" = 202 ] || fail "score: $(wc -l <"$work/one.$dtype") lines of 202"
done
for layout in 2:data_parallel_shard_degree=2 2:tensor_parallel_degree=2 2:data_parallel_replicate_degree=2 4:tensor_parallel_degree=2 \
  2:pipeline_parallel_degree=2 4:pipeline_parallel_degree=2; do
  launch "${layout%%:*}" score "$model" "$work/ids.jsonl" --max-tokens 100 -o "$work/file" --parallelism."${layout#*:}"
  same "$work/one.float32" "$work/file" || fail "score with $layout: other numbers than one process"
  grep -q "perplexity" "$work/log" && [ "$(grep -c "mean log-prob" "$work/log")" = 1 ] || { cat "$work/log"; fail "$layout: no summary, or several"; }
done
# More ranks than records: those without one take part all the same.
head -n 1 "$work/ids.jsonl" >"$work/few.jsonl"
launch 4 score "$model" "$work/few.jsonl" -o "$work/file"
same <(head -n 1 "$work/one.float32") "$work/file" || fail "score of one record on four ranks"
# An error says itself once a rank, by the status of its kind.
status=0; $titanium launch -n 2 score "$model" "$work/ids.jsonl" --max-tokens 3 2>"$work/log" || status=$?
[ $status = 3 ] || { cat "$work/log"; fail "a record over --max-tokens ends two ranks with $status"; }
status=0; $titanium launch -n 2 score "$model" "$work/ids.jsonl" -o "$work/no/such/folder" 2>"$work/log" || status=$?
[ $status = 2 ] && grep -q "rank 0: --output" "$work/log" || { cat "$work/log"; fail "an output that cannot be written ends two ranks with $status"; }

# A model with a tokenizer, of random weights.
mkdir "$work/text"
sed 's/"vocab_size": 320/"vocab_size": 49152/' "$source_dir/tests/data/models/llama_tied/config.json" >"$work/text/config.json"
cp "$source_dir"/tests/data/tokenizer/{tokenizer.json,tokenizer_config.json} "$work/text"
echo '{"text": "Hello there, and good evening to all of you."}' >"$work/text.jsonl"
$titanium train --model.path="$work/text" --data.path="$work/text.jsonl" --dump_folder="$work/run" --training.steps=1 --training.global_batch_size=1 \
  --checkpoint.initial_load_in_hf=false --checkpoint.enable=false --training.threads=1 --checkpoint.export_dtype=float32 2>"$work/log" || { cat "$work/log"; fail train; }
model=$work/run/hf
$titanium generate "$model" -p "Hello" -n 12 >"$work/one"
launch 2 generate "$model" -p "Hello" -n 12 >"$work/two"
[ "$(sed 's/^\[0\] //' "$work/two")" = "$(cat "$work/one")" ] || { cat "$work/one" "$work/two"; fail "generate on two ranks"; }
status=0; $titanium launch -n 2 generate "$model" -p "Hello" --parallelism.tensor_parallel_degree=2 2>"$work/log" || status=$?
[ $status = 2 ] && grep -q "tensor_parallel_degree = 2: generate" "$work/log" || { cat "$work/log"; fail "generate with tensor parallelism: $status"; }
status=0; $titanium launch -n 2 generate "$model" -p "Hello" --parallelism.pipeline_parallel_degree=2 2>"$work/log" || status=$?
[ $status = 2 ] && grep -q "pipeline_parallel_degree = 2: generate" "$work/log" || { cat "$work/log"; fail "generate with a pipeline: $status"; }

# check, in the pipelines of every schedule; train says its lines once.
for schedule in GPipe 1F1B Interleaved1F1B LoopedBFS InterleavedZeroBubble ZBVZeroBubble DualPipeV; do
  launch 2 check "$source_dir/tests/data/models/qwen3_tied" --dtype float64 --parallelism.pipeline_parallel_degree=2 \
    --parallelism.pipeline_parallel_schedule=$schedule >"$work/checked"
  grep -q " 0 outside their tolerance" "$work/checked" || { cat "$work/checked"; fail "check with $schedule"; }
done
launch 2 check "$source_dir/tests/data/models/qwen3_tied" --parallelism.pipeline_parallel_schedule=GPipe >/dev/null
[ "$(grep -c 'pipeline_parallel_schedule = "GPipe" has no effect: ' "$work/log")" = 1 ] || { cat "$work/log"; fail "check: a schedule without a pipeline"; }
launch 4 train "${config[@]}" --dump_folder="$work/pipeline" --training.steps=4 --metrics.log_freq=1 --parallelism.pipeline_parallel_degree=2
for line in "step 3/4 " "step 4: validation loss" "model written to"; do
  [ "$(grep -c "$line" "$work/log")" = 1 ] || { cat "$work/log"; fail "'$line' is there $(grep -c "$line" "$work/log") times"; }
done
echo ok

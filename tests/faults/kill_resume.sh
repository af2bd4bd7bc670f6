#!/usr/bin/env bash
# A run killed with -9 at random points (several inside saves: it saves after every step) and resumed ends with bitwise the
# weights of the straight run.   kill_resume.sh titanium source_dir kills
. "$(dirname "$0")/common.sh"
kills=$3
steps=30
run=(train "${config[@]}" --training.steps=$steps --checkpoint.keep_latest_k=2)

$titanium "${run[@]}" --dump_folder="$work/straight" --checkpoint.interval=1000 2>"$work/log" || { cat "$work/log"; fail "the straight run"; }
begin=$(date +%s%N)
$titanium "${run[@]}" --dump_folder="$work/timed" --checkpoint.interval=1 2>"$work/log" || { cat "$work/log"; fail "the timed run"; }
took=$((($(date +%s%N) - begin) / 1000000))
[ "$(weights_of "$work/straight")" = "$(weights_of "$work/timed")" ] || fail "saving changed the weights"

RANDOM=11
killed=0
for ((k = 0; k < kills; ++k)); do
  $titanium "${run[@]}" --dump_folder="$work/killed" --checkpoint.interval=1 2>>"$work/killed.log" &
  pid=$!
  # Somewhere in the first part of what is left, so that every kill finds something to interrupt.
  delay=$((took * (20 + RANDOM % 60) / 100))
  sleep "$(awk -v ms=$delay 'BEGIN { printf "%.3f", ms / 1000 }')"
  if kill -9 $pid 2>/dev/null; then killed=$((killed + 1)); fi
  wait $pid 2>/dev/null || true
done
$titanium "${run[@]}" --dump_folder="$work/killed" --checkpoint.interval=1 2>>"$work/killed.log" || { tail -n 20 "$work/killed.log"; fail "the resumed run"; }
grep -c resumed "$work/killed.log" | xargs echo "killed $killed times of $kills; resumed:"
[ "$(weights_of "$work/straight")" = "$(weights_of "$work/killed")" ] || fail "the resumed run ended with other weights"
[ "$(ls -d "$work"/killed/checkpoint/step-* | wc -l)" -le 2 ] || fail "old checkpoints were left: $(ls "$work/killed/checkpoint")"
# Every step is in the metrics once.
[ "$(grep -o '"step": *[0-9]*,"loss"\|"step":[0-9]*,"loss"\|"step": [0-9]*, "loss"' "$work/killed/metrics.jsonl" | sort -u | wc -l)" = $steps ] ||
  fail "metrics.jsonl does not hold each of the $steps steps"
echo ok

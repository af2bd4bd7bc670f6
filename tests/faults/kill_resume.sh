#!/usr/bin/env bash
# A run killed with -9 at random points (several inside saves: it saves after every step) and resumed ends with bitwise the
# weights of the straight run.   kill_resume.sh titanium source_dir kills
. "$(dirname "$0")/common.sh"
kills=$3
steps=30
run=(train "${config[@]}" --training.steps=$steps --checkpoint.keep_latest_k=2 --training.global_batch_size=60 --training.threads=2)

$titanium "${run[@]}" --dump_folder="$work/straight" --checkpoint.interval=1000 2>"$work/log" || { cat "$work/log"; fail "the straight run"; }
$titanium "${run[@]}" --dump_folder="$work/saving" --checkpoint.interval=1 2>"$work/log" || { cat "$work/log"; fail "the run that saves"; }
[ "$(weights_of "$work/straight")" = "$(weights_of "$work/saving")" ] || fail "saving changed the weights"

RANDOM=11
killed=0
steps_done() { local n; n=$(grep -c '"loss"' "$work/killed/metrics.jsonl" 2>/dev/null) || true; echo "${n:-0}"; }
for ((k = 1; k <= kills; ++k)); do
  $titanium "${run[@]}" --dump_folder="$work/killed" --checkpoint.interval=1 2>>"$work/killed.log" &
  pid=$!
  # Some way into the run, at a random moment of a step or of the save after it.
  target=$((steps * k / (2 * kills)))
  while [ "$(steps_done)" -lt $target ] && kill -0 $pid 2>/dev/null; do sleep 0.01; done
  sleep "$(printf '0.%03d' $((RANDOM % 60)))"
  if kill -9 $pid 2>/dev/null; then killed=$((killed + 1)); fi
  wait $pid 2>/dev/null || true
done
[ $killed = "$kills" ] || fail "only $killed of $kills runs were killed before they ended"
$titanium "${run[@]}" --dump_folder="$work/killed" --checkpoint.interval=1 2>>"$work/killed.log" || { tail -n 20 "$work/killed.log"; fail "the resumed run"; }
grep -c resumed "$work/killed.log" | xargs echo "killed $killed times of $kills; resumed:"
[ "$(weights_of "$work/straight")" = "$(weights_of "$work/killed")" ] || fail "the resumed run ended with other weights"
[ "$(ls -d "$work"/killed/checkpoint/step-* | wc -l)" -le 2 ] || fail "old checkpoints were left: $(ls "$work/killed/checkpoint")"
# Every step is in the metrics once.
[ "$(grep -o '"step": *[0-9]*,"loss"\|"step":[0-9]*,"loss"\|"step": [0-9]*, "loss"' "$work/killed/metrics.jsonl" | sort -u | wc -l)" = $steps ] ||
  fail "metrics.jsonl does not hold each of the $steps steps"
echo ok

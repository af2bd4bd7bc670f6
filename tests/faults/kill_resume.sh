#!/usr/bin/env bash
# A run killed with -9 at random points, every second time inside a save (it saves after every step), and each time resumed ends with bitwise
# the weights of the straight run.   kill_resume.sh titanium source_dir kills
. "$(dirname "$0")/common.sh"
kills=$3
steps=$((20 + 2 * kills))  # a run that is killed gets one to two steps further
run=(train "${config[@]}" --training.steps=$steps --checkpoint.keep_latest_k=2 --training.global_batch_size=60 --training.threads=2)

$titanium "${run[@]}" --dump_folder="$work/straight" --checkpoint.interval=1000 2>"$work/log" || { cat "$work/log"; fail "the straight run"; }
$titanium "${run[@]}" --dump_folder="$work/saving" --checkpoint.interval=1 2>"$work/log" || { cat "$work/log"; fail "the run that saves"; }
[ "$(weights_of "$work/straight")" = "$(weights_of "$work/saving")" ] || fail "saving changed the weights"

RANDOM=11
killed=0 in_saves=0
shopt -s nullglob
steps_done() { local n; n=$(grep -c '"loss"' "$work/killed/metrics.jsonl" 2>/dev/null) || true; echo "${n:-0}"; }
# A save of this run, not what an earlier kill left behind.
in_a_save() { local d; for d in "$work"/killed/checkpoint/step-*.partial; do if [ "$d" -nt "$work/launched" ]; then return 0; fi; done; return 1; }
for ((k = 1; k <= kills; ++k)); do
  target=$(($(steps_done) + 1))
  touch "$work/launched"
  $titanium "${run[@]}" --dump_folder="$work/killed" --checkpoint.interval=1 2>>"$work/killed.log" &
  pid=$!
  # A step further than the run before, then at a random moment of the next step or in its save.
  while [ "$(steps_done)" -lt $target ] && kill -0 $pid 2>/dev/null; do sleep 0.01; done
  touch "$work/launched"
  if [ $((k % 2)) = 0 ]; then
    for ((i = 0; i < 200000; ++i)); do if in_a_save; then break; fi; done  # a loop of builtins: a save takes milliseconds
  else
    sleep "$(printf '0.%03d' $((RANDOM % 60)))"
  fi
  if kill -9 $pid 2>/dev/null; then killed=$((killed + 1)); fi
  wait $pid 2>/dev/null || true
  if in_a_save; then in_saves=$((in_saves + 1)); fi
done
[ $killed = "$kills" ] || fail "only $killed of $kills runs were killed before they ended"
$titanium "${run[@]}" --dump_folder="$work/killed" --checkpoint.interval=1 2>>"$work/killed.log" || { tail -n 20 "$work/killed.log"; fail "the resumed run"; }
resumed=$(grep -c "resumed after" "$work/killed.log") || true
echo "killed $killed times of $kills, $in_saves of them inside a save; resumed $resumed times"
[ $in_saves -ge $((kills / 5)) ] || fail "only $in_saves of $kills kills came inside a save"
[ "$resumed" -ge $((kills * 8 / 10)) ] || fail "only $resumed resumes after $kills kills"
[ "$(weights_of "$work/straight")" = "$(weights_of "$work/killed")" ] || fail "the resumed run ended with other weights"
[ "$(ls -d "$work"/killed/checkpoint/step-* | wc -l)" -le 2 ] || fail "old checkpoints were left: $(ls "$work/killed/checkpoint")"
# Every step is in the metrics once, and so is every validation.
steps_in() { grep "$1" "$work/killed/metrics.jsonl" | grep -o '"step": *[0-9]*' | grep -o '[0-9]*$'; }
[ "$(steps_in '"loss"')" = "$(seq $steps)" ] || { cat "$work/killed/metrics.jsonl"; fail "metrics.jsonl does not hold each of the $steps steps once"; }
[ -z "$(steps_in '"validation_loss"' | sort -n | uniq -d)" ] || { grep validation_loss "$work/killed/metrics.jsonl"; fail "a validation is there twice"; }
echo ok

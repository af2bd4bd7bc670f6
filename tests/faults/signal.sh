#!/usr/bin/env bash
# SIGTERM, SIGINT and SIGHUP: the step is finished, saved, exit 128 + the signal with a word how to resume; the resumed run equals the
# straight one.
. "$(dirname "$0")/common.sh"
run=(train "${config[@]}" --training.steps=400 --checkpoint.interval=1000 --checkpoint.async_mode=async)
for signal in TERM INT HUP; do
  dump="$work/$signal"
  setsid "$titanium" "${run[@]}" --dump_folder="$dump" 2>"$work/log" &
  pid=$!
  for _ in $(seq 100); do [ -s "$dump/metrics.jsonl" ] && break; sleep 0.1; done
  sleep 0.3
  kill -$signal $pid
  status=0; wait $pid || status=$?
  [ $status = $((128 + $(kill -l $signal))) ] || { cat "$work/log"; fail "SIG$signal ended the run with status $status"; }
  grep -q "goes on from there" "$work/log" || { cat "$work/log"; fail "SIG$signal: no word how to resume"; }
  words=1; [ $signal != HUP ] || words=0
  [ "$(grep -c "finishing this step" "$work/log")" = $words ] || { cat "$work/log"; fail "SIG$signal: not $words words at the signal"; }
  "$titanium" "${run[@]}" --dump_folder="$dump" 2>"$work/log" || { cat "$work/log"; fail "resume after SIG$signal"; }
  grep -q "resumed" "$work/log" || fail "SIG$signal: the second run started anew"
done
"$titanium" "${run[@]}" --dump_folder="$work/straight" 2>"$work/log"
for signal in TERM INT HUP; do
  [ "$(weights_of "$work/straight")" = "$(weights_of "$work/$signal")" ] || fail "resumed after SIG$signal, other weights"
done
# Where nothing is saved the last word does not say otherwise.
setsid "$titanium" "${run[@]}" --training.steps=100000 --checkpoint.enable=false --dump_folder="$work/unsaved" 2>"$work/log" &
pid=$!
for _ in $(seq 100); do [ -s "$work/unsaved/metrics.jsonl" ] && break; sleep 0.1; done
kill -TERM $pid
status=0; wait $pid || status=$?
[ $status = 143 ] || fail "status $status without checkpoints"
grep -q "they are not saved (checkpoint.enable = false)" "$work/log" || { cat "$work/log"; fail "no word that nothing was saved"; }
! grep -q "goes on from there" "$work/log" || fail "a run without checkpoints promises to go on"
# Under the launcher the same, and no rank counts as one that failed.
"$titanium" launch -n 2 "${run[@]}" --dump_folder="$work/ranks" 2>"$work/log" &
pid=$!
for _ in $(seq 100); do [ -s "$work/ranks/metrics.jsonl" ] && break; sleep 0.1; done
kill -TERM $pid
status=0; wait $pid || status=$?
[ $status = 143 ] || { cat "$work/log"; fail "status $status of two ranks"; }
grep -q "goes on from there" "$work/log" || { cat "$work/log"; fail "two ranks: no word how to resume"; }
! grep -q "titanium launch" "$work/log" || { cat "$work/log"; fail "a rank that was asked to stop counts as one that failed"; }
# The same signal again ends it at once.
setsid "$titanium" "${run[@]}" --training.global_batch_size=50000 --dump_folder="$work/twice" 2>"$work/log" &  # one step takes seconds
pid=$!
for _ in $(seq 100); do grep -q "memory: about" "$work/log" && break; sleep 0.1; done
sleep 0.3
kill -TERM $pid
for _ in $(seq 100); do grep -q "the same signal again ends it at once" "$work/log" && break; sleep 0.01; done
kill -TERM $pid || fail "the step was not a long one"
status=0; wait $pid || status=$?
[ $status = 143 ] || { cat "$work/log"; fail "status $status after the second signal"; }
grep -q "the same signal again ends it at once" "$work/log" || { cat "$work/log"; fail "no word at the first signal"; }
# A reader of the log that ends does not end the run.
set +o pipefail
{ "$titanium" "${run[@]}" --training.steps=30 --metrics.log_freq=1 --dump_folder="$work/pipe" 2>&1; echo $? >"$work/status"; } | head -n 2 >/dev/null
set -o pipefail
[ "$(cat "$work/status")" = 0 ] && [ -e "$work/pipe/hf/model.safetensors" ] || fail "a closed pipe ended the run: $(cat "$work/status")"
echo ok

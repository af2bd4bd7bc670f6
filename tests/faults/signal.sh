#!/usr/bin/env bash
# SIGTERM and SIGINT: the step is finished, saved, exit 0 with a word how to resume; the resumed run equals the straight one.
. "$(dirname "$0")/common.sh"
run=(train "${config[@]}" --training.steps=400 --checkpoint.interval=1000 --checkpoint.async_mode=async)
for signal in TERM INT; do
  dump="$work/$signal"
  setsid "$titanium" "${run[@]}" --dump_folder="$dump" 2>"$work/log" &
  pid=$!
  for _ in $(seq 100); do [ -s "$dump/metrics.jsonl" ] && break; sleep 0.1; done
  sleep 0.3
  kill -$signal $pid
  status=0; wait $pid || status=$?
  [ $status = 0 ] || { cat "$work/log"; fail "SIG$signal ended the run with status $status"; }
  grep -q "goes on from there" "$work/log" || { cat "$work/log"; fail "SIG$signal: no word how to resume"; }
  "$titanium" "${run[@]}" --dump_folder="$dump" 2>"$work/log" || { cat "$work/log"; fail "resume after SIG$signal"; }
  grep -q "resumed" "$work/log" || fail "SIG$signal: the second run started anew"
done
"$titanium" "${run[@]}" --dump_folder="$work/straight" 2>"$work/log"
for signal in TERM INT; do
  [ "$(weights_of "$work/straight")" = "$(weights_of "$work/$signal")" ] || fail "resumed after SIG$signal, other weights"
done
echo ok

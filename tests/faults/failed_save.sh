#!/usr/bin/env bash
# A save that fails (here: a file stands where the checkpoints' folder was) is a warning at once, and costs no later save; a run
# whose last save fails says so by its exit status.
. "$(dirname "$0")/common.sh"
run=(train "${config[@]}" --training.steps=100000 --checkpoint.interval=5 --checkpoint.keep_latest_k=2 --validator.enable=false)
wait_for() {  # what, then a command that succeeds once it is so
  local what=$1; shift
  for _ in $(seq 600); do "$@" && return 0; kill -0 $pid 2>/dev/null || break; sleep 0.05; done
  tail -n 5 "$work/log"; kill -9 $pid 2>/dev/null; fail "no $what"
}
# Puts a file where the checkpoints' folder is; a save that runs meanwhile may make the folder anew.
block() {
  local n=0
  : >"$1/file"
  until mv -T "$1/checkpoint" "$1/away.$n" && mv -T "$1/file" "$1/checkpoint" 2>/dev/null; do n=$((n + 1)); done
}
a_checkpoint() { [ -n "$(ls "$1" 2>/dev/null | grep -v partial)" ]; }

for mode in async disabled; do
  dump="$work/$mode"
  setsid "$titanium" "${run[@]}" --checkpoint.async_mode=$mode --dump_folder="$dump" 2>"$work/log" &
  pid=$!
  wait_for "first checkpoint" a_checkpoint "$dump/checkpoint"
  block "$dump"
  wait_for "warning of the failed save" grep -q "could not be saved: .*Not a directory; training goes on" "$work/log"
  rm "$dump/checkpoint"
  wait_for "later checkpoint" a_checkpoint "$dump/checkpoint"
  # The last save is of the state at the signal, and it is there.
  kill -TERM $pid
  status=0; wait $pid || status=$?
  [ $status = 143 ] || { tail -n 5 "$work/log"; fail "$mode: status $status after the disk had room again"; }
  last=$(grep -o 'stopped after [0-9]* updates' "$work/log" | grep -o '[0-9]*')
  [ -e "$dump/checkpoint/step-$last/COMPLETE" ] || { ls "$dump/checkpoint"; fail "$mode: no checkpoint of the last step, $last"; }
done

# The last save fails: the model is exported all the same, the status is that of a checkpoint that cannot be written.
dump="$work/last"
setsid "$titanium" "${run[@]}" --training.steps=400 --dump_folder="$dump" 2>"$work/log" &
pid=$!
wait_for "first checkpoint" a_checkpoint "$dump/checkpoint"
block "$dump"
status=0; wait $pid || status=$?
[ $status = 4 ] || { tail -n 5 "$work/log"; fail "status $status, not 4, of a run whose last checkpoint could not be saved"; }
grep -q "the last checkpoint, of step 400, could not be saved" "$work/log" || { tail -n 5 "$work/log"; fail "no word of the last save"; }
[ -e "$dump/hf/model.safetensors" ] || fail "the model of a run whose last checkpoint could not be saved is lost"
echo ok

#!/usr/bin/env bash
# Whole runs on two processes: the losses of one process; a rank killed with -9 ends the other, and the run resumes bitwise; a checkpoint of
# two ranks resumes on one rank and on another layout.   ranks.sh titanium source_dir kills
. "$(dirname "$0")/common.sh"
kills=$3
steps=$((30 + 10 * kills))  # a run that is killed gets some steps further, and must not reach the end before it is
run=("${config[@]}" --training.steps=$steps --checkpoint.keep_latest_k=3 --training.global_batch_size=60 --comm.train_timeout_seconds=60)
losses_of() { grep '"loss"' "$1/metrics.jsonl" | sed -E 's/.*"step": *([0-9]+).*/\1 &/; s/^([0-9]+) .*"loss": *([-+.e0-9]+).*/\1 \2/'; }
# Both files hold the same steps, and losses that differ by less than the relative bound.
same_losses() {  # a b bound
  paste <(losses_of "$1") <(losses_of "$2") | awk -v bound="$3" '
    { d = $2 - $4; if (d < 0) d = -d; if ($1 != $3 || NF != 4 || d > bound * ($4 < 0 ? -$4 : $4)) { print "step " $1 " loss " $2 " against step " $3 " loss " $4; bad = 1 } n++ }
    END { exit bad || n == 0 }'
}

$titanium train "${run[@]}" --dump_folder="$work/one" --checkpoint.interval=1000 2>"$work/log" || { cat "$work/log"; fail "one rank"; }
for layout in data_parallel_shard_degree=2 tensor_parallel_degree=2 data_parallel_replicate_degree=2; do
  $titanium launch -n 2 train "${run[@]}" --parallelism.$layout --dump_folder="$work/$layout" --checkpoint.interval=1000 2>"$work/log" \
    || { cat "$work/log"; fail "two ranks, $layout"; }
  same_losses "$work/one" "$work/$layout" 1e-5 || fail "the losses of two ranks ($layout) are not those of one"
done
straight=$work/data_parallel_shard_degree=2
# Over TCP sums are taken in the same order.
$titanium launch -n 2 train "${run[@]}" --comm.transport=gloo --dump_folder="$work/gloo" --checkpoint.interval=1000 2>"$work/log" || { cat "$work/log"; fail "over Gloo"; }
[ "$(weights_of "$straight")" = "$(weights_of "$work/gloo")" ] || fail "two ranks over Gloo end with other weights than over shared memory"

RANDOM=5
killed=$work/killed
steps_done() { local n; n=$(grep -c '"loss"' "$killed/metrics.jsonl" 2>/dev/null) || true; echo "${n:-0}"; }
for ((k = 1; k <= kills; ++k)); do
  target=$(($(steps_done) + 1))
  $titanium launch -n 2 train "${run[@]}" --dump_folder="$killed" --checkpoint.interval=1 2>"$work/killed.log" &
  launcher=$!
  while [ "$(steps_done)" -lt $target ] && kill -0 $launcher 2>/dev/null; do sleep 0.01; done
  sleep "$(printf '0.%03d' $((RANDOM % 80)))"
  mapfile -t ranks < <(ps -o pid= --ppid $launcher)
  [ ${#ranks[@]} = 2 ] || { cat "$work/killed.log"; fail "the launcher has ${#ranks[@]} ranks"; }
  kill -9 "${ranks[$((k % 2))]}"
  begin=$SECONDS
  if wait $launcher; then fail "a run whose rank was killed ended with status 0"; fi
  [ $((SECONDS - begin)) -le 20 ] || fail "the other rank ended only after $((SECONDS - begin)) s"
  grep -q "was ended by signal 9" "$work/killed.log" || { cat "$work/killed.log"; fail "the launcher does not say which rank was killed"; }
done
$titanium launch -n 2 train "${run[@]}" --dump_folder="$killed" --checkpoint.interval=1 2>"$work/killed.log" || { cat "$work/killed.log"; fail "the resumed run"; }
grep -q "resumed after" "$work/killed.log" || fail "the last run did not resume"
[ "$(weights_of "$straight")" = "$(weights_of "$killed")" ] || fail "the resumed run ended with other weights"

# A checkpoint of the middle of the run, on other layouts.
$titanium launch -n 2 train "${run[@]}" --dump_folder="$work/half" --checkpoint.interval=6 --checkpoint.keep_latest_k=0 2>"$work/log" || fail "the run that is cut"
for layout in one:data_parallel_shard_degree=1 two:tensor_parallel_degree=2; do
  folder=$work/other-${layout%%:*}
  cp -r "$work/half" "$folder"
  rm -r "$folder/hf"
  for c in "$folder"/checkpoint/step-*; do [ "$(basename "$c")" = step-6 ] || rm -r "$c"; done
  if [ "${layout%%:*}" = one ]; then start=("$titanium"); else start=("$titanium" launch -n 2); fi
  "${start[@]}" train "${run[@]}" --parallelism.${layout#*:} --dump_folder="$folder" --checkpoint.interval=1000 2>"$work/log" \
    || { cat "$work/log"; fail "resuming a checkpoint of two ranks with $layout"; }
  grep -q "resumed after 6" "$work/log" || { cat "$work/log"; fail "$layout did not resume"; }
  same_losses "$work/one" "$folder" 1e-5 || fail "resumed with $layout: other losses"
done
echo ok

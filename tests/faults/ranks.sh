#!/usr/bin/env bash
# Whole runs on several processes: the losses of one process; a rank killed with -9 ends the others, and the run resumes bitwise; a checkpoint
# of eight ranks resumes on other numbers of them.   ranks.sh titanium source_dir kills ranks
. "$(dirname "$0")/common.sh"
kills=$3 ranks=$4
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
for layout in data_parallel_shard_degree tensor_parallel_degree data_parallel_replicate_degree; do
  $titanium launch -n "$ranks" train "${run[@]}" --parallelism.$layout="$ranks" --dump_folder="$work/$layout" --checkpoint.interval=1000 2>"$work/log" \
    || { cat "$work/log"; fail "$ranks ranks, $layout"; }
  same_losses "$work/one" "$work/$layout" 1e-5 || fail "the losses of $ranks ranks ($layout) are not those of one"
done
straight=$work/data_parallel_shard_degree
# Over TCP sums are taken in the same order.
$titanium launch -n "$ranks" train "${run[@]}" --comm.transport=gloo --dump_folder="$work/gloo" --checkpoint.interval=1000 2>"$work/log" || { cat "$work/log"; fail "over Gloo"; }
[ "$(weights_of "$straight")" = "$(weights_of "$work/gloo")" ] || fail "ranks over Gloo end with other weights than over shared memory"

RANDOM=5
killed=$work/killed
steps_done() { local n; n=$(grep -c '"loss"' "$killed/metrics.jsonl" 2>/dev/null) || true; echo "${n:-0}"; }
for ((k = 1; k <= kills; ++k)); do
  target=$(($(steps_done) + 1))
  $titanium launch -n "$ranks" train "${run[@]}" --dump_folder="$killed" --checkpoint.interval=1 2>"$work/killed.log" &
  launcher=$!
  while [ "$(steps_done)" -lt $target ] && kill -0 $launcher 2>/dev/null; do sleep 0.01; done
  sleep "$(printf '0.%03d' $((RANDOM % 80)))"
  mapfile -t pids < <(ps -o pid= --ppid $launcher)
  [ ${#pids[@]} = "$ranks" ] || { cat "$work/killed.log"; fail "the launcher has ${#pids[@]} ranks"; }
  kill -9 "${pids[$((k % ranks))]}"
  begin=$SECONDS
  if wait $launcher; then fail "a run whose rank was killed ended with status 0"; fi
  [ $((SECONDS - begin)) -le 20 ] || fail "the other ranks ended only after $((SECONDS - begin)) s"
  grep -q "was ended by signal 9" "$work/killed.log" || { cat "$work/killed.log"; fail "the launcher does not say which rank was killed"; }
done
$titanium launch -n "$ranks" train "${run[@]}" --dump_folder="$killed" --checkpoint.interval=1 2>"$work/killed.log" || { cat "$work/killed.log"; fail "the resumed run"; }
grep -q "resumed after" "$work/killed.log" || fail "the last run did not resume"
[ "$(weights_of "$straight")" = "$(weights_of "$killed")" ] || fail "the resumed run ended with other weights"

# A checkpoint of FSDP 4 x TP 2, on other layouts.
run=("${config[@]}" --training.global_batch_size=60 --lr_scheduler.total_steps=12 --comm.train_timeout_seconds=60)
$titanium train "${run[@]}" --training.steps=12 --dump_folder="$work/twelve" 2>"$work/log" || { cat "$work/log"; fail "twelve steps of one rank"; }
$titanium launch -n 8 train "${run[@]}" --training.steps=6 --parallelism.data_parallel_shard_degree=4 --parallelism.tensor_parallel_degree=2 \
  --dump_folder="$work/eight" 2>"$work/log" || { cat "$work/log"; fail "six steps of eight ranks"; }
for layout in 1:data_parallel_shard_degree=1 3:data_parallel_shard_degree=3 2:tensor_parallel_degree=2; do
  n=${layout%%:*} folder=$work/on-${layout%%:*}
  cp -r "$work/eight" "$folder"
  $titanium launch -n "$n" train "${run[@]}" --training.steps=12 --parallelism.${layout#*:} --dump_folder="$folder" 2>"$work/log" \
    || { cat "$work/log"; fail "resuming a checkpoint of eight ranks on $n"; }
  grep -q "resumed after 6" "$work/log" || { cat "$work/log"; fail "$n ranks did not resume"; }
  same_losses "$work/twelve" "$folder" 1e-5 || fail "resumed on $n ranks: other losses"
done
echo ok

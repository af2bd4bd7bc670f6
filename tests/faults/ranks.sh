#!/usr/bin/env bash
# Whole runs on several processes: the losses of one process; a rank killed with -9 ends the others, and the run resumes bitwise; a checkpoint
# of one layout resumes on another.   ranks.sh titanium source_dir kills ranks
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
for layout in data_parallel_shard_degree tensor_parallel_degree data_parallel_replicate_degree pipeline_parallel_degree; do
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

# Checkpoints of some layouts, on others.
run=("${config[@]}" --training.global_batch_size=60 --lr_scheduler.total_steps=12 --comm.train_timeout_seconds=60 --training.dtype=float64
  --training.mixed_precision_param=float64 --training.mixed_precision_reduce=float64 --checkpoint.last_save_in_hf=false)
$titanium train "${run[@]}" --training.steps=12 --dump_folder="$work/twelve" 2>"$work/log" || { cat "$work/log"; fail "twelve steps of one rank"; }
keys_of() { tr ',' '\n' <<<"$1" | sed 's/^fsdp/data_parallel_shard_degree/; s/^tp/tensor_parallel_degree/; s/^pp/pipeline_parallel_degree/; s/^schedule/pipeline_parallel_schedule/; s/^/--parallelism./'; }
for saved in 8:fsdp=4,tp=2 2:pp=2 2:pp=2,schedule=ZBVZeroBubble 4:fsdp=2,pp=2; do
  mapfile -t keys < <(keys_of "${saved#*:}")
  $titanium launch -n "${saved%%:*}" train "${run[@]}" --training.steps=6 "${keys[@]}" --dump_folder="$work/$saved" 2>"$work/log" \
    || { cat "$work/log"; fail "six steps of $saved"; }
  for layout in 1:fsdp=1 3:fsdp=3 2:tp=2 2:pp=2,schedule=DualPipeV; do
    mapfile -t keys < <(keys_of "${layout#*:}")
    cp -r "$work/$saved" "$work/resumed"
    $titanium launch -n "${layout%%:*}" train "${run[@]}" --training.steps=12 "${keys[@]}" --dump_folder="$work/resumed" 2>"$work/log" \
      || { cat "$work/log"; fail "resuming a checkpoint of $saved on $layout"; }
    grep -q "resumed after 6" "$work/log" || { cat "$work/log"; fail "$layout did not resume what $saved saved"; }
    same_losses "$work/twelve" "$work/resumed" 1e-9 || fail "saved on $saved, resumed on $layout: other losses"
    rm -r "$work/resumed"
  done
done
echo ok

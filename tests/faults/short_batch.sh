#!/usr/bin/env bash
# 10 records in batches of 4: the last step has 2, and its loss and norm are those of a run that begins there, in batches of 2.
. "$(dirname "$0")/common.sh"
head -n 10 "$work/ids.jsonl" >"$work/ten.jsonl"
tail -n 2 "$work/ten.jsonl" >"$work/two.jsonl"
run=(train "${config[@]}" --data.validation_split=0 --data.shuffle=false --training.global_batch_size=4 --lr_scheduler.warmup_steps=1
  --checkpoint.keep_latest_k=0 --checkpoint.interval=1 --checkpoint.last_save_in_hf=false)
numbers() { grep "\"step\": *$2[,}]" "$work/$1/metrics.jsonl" | grep -o '"\(loss\|grad_norm\)": *[-0-9.eE+]*'; }
for mode in token-mean seq-mean-token-sum seq-mean-token-mean; do
  $titanium "${run[@]}" --data.path="$work/ten.jsonl" --data.last_batch=keep --training.loss_agg_mode=$mode \
    --dump_folder="$work/all-$mode" 2>"$work/log" || { cat "$work/log"; fail "$mode"; }
  [ "$(grep -c '"loss"' "$work/all-$mode/metrics.jsonl")" = 3 ] || fail "$mode: not 3 steps"
  $titanium "${run[@]}" --data.path="$work/two.jsonl" --training.global_batch_size=2 --training.loss_agg_mode=$mode \
    --checkpoint.initial_load_path="$work/all-$mode/checkpoint/step-2" --checkpoint.initial_load_in_hf=false \
    --dump_folder="$work/alone-$mode" 2>"$work/log" || { cat "$work/log"; fail "$mode alone"; }
  [ -n "$(numbers "all-$mode" 3)" ] || fail "$mode: no numbers of step 3"
  [ "$(numbers "all-$mode" 3)" = "$(numbers "alone-$mode" 1)" ] ||
    fail "$mode: step 3 is $(numbers "all-$mode" 3), alone $(numbers "alone-$mode" 1)"
done
# Left out by default, or an error by option.
$titanium "${run[@]}" --data.path="$work/ten.jsonl" --dump_folder="$work/drop" 2>"$work/log" || { cat "$work/log"; fail drop; }
[ "$(grep -c '"loss"' "$work/drop/metrics.jsonl")" = 2 ] || fail "the records that do not fill a step were not dropped"
got=0
$titanium "${run[@]}" --data.path="$work/ten.jsonl" --data.last_batch=fail --dump_folder="$work/fail" 2>"$work/log" || got=$?
[ $got = 2 ] && grep -q "last_batch" "$work/log" || { cat "$work/log"; fail "last_batch=fail: status $got"; }
echo ok

#!/usr/bin/env bash
# What must not change a result: the micro-batch budget and the recompute mode in fp64 to 1e-9, a repeat to the bit.
. "$(dirname "$0")/common.sh"
fp64=(--training.dtype=float64 --training.mixed_precision_param=float64 --training.mixed_precision_reduce=float64
  --optimizer.state_dtype=float64 --checkpoint.export_dtype=float64 --training.steps=12)
losses() { grep '"loss"' "$1/metrics.jsonl" | sed -E 's/.*"loss": ?([-0-9.eE+]+).*"grad_norm": ?([-0-9.eE+]+).*/\1 \2/'; }
compare() {  # name, then overrides
  name=$1; shift
  $titanium train "${config[@]}" "${fp64[@]}" --dump_folder="$work/$name" "$@" 2>"$work/log" || { cat "$work/log"; fail "$name"; }
  paste <(losses "$work/base") <(losses "$work/$name") | awk -v name="$name" '
    function differs(a, b) { d = a - b; if (d < 0) d = -d; return d > 1e-9 * (a < 0 ? -a : a) + 1e-12 }
    { n++; if (differs($1, $3) || differs($2, $4)) { print "FAIL: " name ", step " n ": " $0; bad = 1 } }
    END { if (n != 12) { print "FAIL: " name ": " n " steps"; bad = 1 } exit bad }'
  echo "$name ok"
}
$titanium train "${config[@]}" "${fp64[@]}" --dump_folder="$work/base" 2>"$work/log" || { cat "$work/log"; fail base; }
$titanium train "${config[@]}" "${fp64[@]}" --dump_folder="$work/again" 2>"$work/log"
[ "$(weights_of "$work/base")" = "$(weights_of "$work/again")" ] || fail "the same run twice gave other weights"
compare one_batch --training.max_tokens_per_microbatch=100000
compare small_batches --training.max_tokens_per_microbatch=64
compare full --activation_checkpoint.mode=full
compare none --activation_checkpoint.mode=none
compare every2 --activation_checkpoint.mode=selective --activation_checkpoint.selective_ac_option=2
compare all_rows --training.head_rows=all
compare threads --training.threads=2
compare offload --training.enable_cpu_offload=true
echo ok

#!/usr/bin/env bash
# The long checks, about two hours on two cores.   nightly.sh [asan] [tsan] [fuzz] [faults]; none: all
set -euo pipefail
cd "$(dirname "$0")/.."
# libtorch and its runtime are not instrumented and hold memory until the end: leaks are looked for in the rooms without torch.
export ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1

# Everything under AddressSanitizer and UBSan.
asan() {
  cmake --preset debug
  ninja -C build-debug -j "$(nproc)"
  ctest --test-dir build-debug --output-on-failure -E 'run_|smollm2' -LE nightly
}

# ThreadSanitizer where threads meet: the loader, the tokenizer, the log, checkpoints, weight sync, ranks.  libgomp is not instrumented, so the programs
# run with one compute thread and their own threads.
tsan() (
  export OMP_NUM_THREADS=1 TSAN_OPTIONS="second_deadlock_stack=1 suppressions=$PWD/scripts/tsan.supp"
  cmake --preset tsan
  ninja -C build-tsan -j "$(nproc)" test_data test_text test_report test_weights test_checkpoint test_sync test_dist test_layouts
  for test in data text report weights checkpoint sync; do build-tsan/test_$test; done
  build-tsan/test_dist --gtest_filter='-*processes*:*Killed*:*EndsBeforeAllCame*'  # ThreadSanitizer follows no forks
  build-tsan/test_layouts --gtest_filter='*qwen3_tied_*:Vocabulary/*:Uneven/*:Layouts.*'
)

# Every parser of files that others write, five minutes each.
fuzz() { scripts/fuzz.sh 300; }

# Many more kills, and every fault at every phase on more layouts.
faults() {
  tests/faults/kill_resume.sh "$PWD/build/titanium" "$PWD" 40
  ctest --test-dir build --output-on-failure -L nightly
}

[ $# -gt 0 ] || set -- asan tsan fuzz faults
for part in "$@"; do
  case $part in
    asan | tsan | fuzz | faults) ;;
    *) echo "nightly.sh: no part '$part': asan, tsan, fuzz or faults" >&2; exit 2 ;;
  esac
done
for part in "$@"; do
  "$part"
  echo "nightly: $part ok"
done

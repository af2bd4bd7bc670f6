#!/usr/bin/env bash
# The long checks: everything under ASan and UBSan, threads under TSan, fuzzers for five minutes each, more kills.
set -euo pipefail
cd "$(dirname "$0")/.."
# libtorch and its runtime are not instrumented and hold memory until the end: leaks are looked for in the rooms without torch.
export ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1
cmake --preset debug
ninja -C build-debug -j "$(nproc)"
# One test compares distances of roundings with a peer's: that is a claim about the kernels of the release build, and `make test` makes
# it; the sanitized build has other ones (no function clones).
GTEST_FILTER='-PpoOnSmolLm2.InBf16IsNoFartherFromFp32ThanTransformers' \
  ctest --test-dir build-debug --output-on-failure -E 'run_|smollm2'

# ThreadSanitizer where threads meet: the loader, the tokenizer, the log, checkpoints, weight sync, ranks.  libgomp is not instrumented, so the programs
# run with one compute thread and their own threads.
export OMP_NUM_THREADS=1 TSAN_OPTIONS="second_deadlock_stack=1 suppressions=$PWD/scripts/tsan.supp"
cmake --preset tsan
ninja -C build-tsan -j "$(nproc)" test_data test_text test_report test_weights test_checkpoint test_sync test_dist test_layouts
for test in data text report weights checkpoint sync; do build-tsan/test_$test; done
build-tsan/test_dist --gtest_filter='-*processes*:*Killed*:*EndsBeforeAllCame*'  # ThreadSanitizer follows no forks
build-tsan/test_layouts --gtest_filter='*qwen3_tied_*:Vocabulary/*:Uneven/*:Layouts.*'

scripts/fuzz.sh 300
tests/faults/kill_resume.sh "$PWD/build/titanium" "$PWD" 40
ctest --test-dir build --output-on-failure -L nightly
echo "nightly: ok"

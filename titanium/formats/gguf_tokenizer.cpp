#include "titanium/formats/gguf_tokenizer.h"

#include <optional>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "titanium/base/error.h"

namespace titanium {
namespace {

// tokenizer.ggml.token_type
enum TokenType : int64_t {
  kNormal = 1,
  kUnknown = 2,
  kControl = 3,
  kUserDefined = 4,
  kUnused = 5,
  kByte = 6
};

struct PreTokenizer {
  Json pre_tokenizer;
  Json normalizer;
  bool ignore_merges = false;  // a piece that is a token as a whole is not merged step by step
  bool add_bos = false;        // when the file does not say
};

Json byte_level(bool use_regex) {
  return {
      {"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", use_regex}};
}

// Llama 3 groups up to three digits, Qwen 2 none; otherwise the expressions are the same.
Json split_then_bytes(const char* digits) {
  const std::string regex = fmt::format(
      R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
      digits);
  const Json split = {
      {"type", "Split"}, {"pattern", {{"Regex", regex}}}, {"behavior", "Isolated"}, {"invert", false}};
  return {{"type", "Sequence"}, {"pretokenizers", {split, byte_level(false)}}};
}

PreTokenizer pre_tokenizer(const GgufFile& file) {
  const auto pre = file.string("tokenizer.ggml.pre");
  if (!pre)
    throw BadCheckpoint("{}: has no key 'tokenizer.ggml.pre'; the pre-tokenizer is not known", file.source());
  if (*pre == "smollm") {
    const Json digits = {{"type", "Digits"}, {"individual_digits", true}};
    return {{{"type", "Sequence"}, {"pretokenizers", {digits, byte_level(true)}}}, nullptr};
  }
  if (*pre == "llama-bpe" || *pre == "llama3" || *pre == "llama-v3") {
    return {split_then_bytes(R"(\p{N}{1,3})"), nullptr, true, true};
  }
  if (*pre == "qwen2") return {split_then_bytes(R"(\p{N})"), {{"type", "NFC"}}};
  if (*pre == "gpt-2") return {byte_level(true), nullptr};
  throw BadCheckpoint("{}: key 'tokenizer.ggml.pre' is '{}' (allowed: smollm, llama-bpe, qwen2, gpt-2)",
                      file.source(), *pre);
}

class Describer {
 public:
  Describer(const GgufFile& file, int64_t vocab_size) : file_(file) {
    const auto model = file.string("tokenizer.ggml.model");
    if (!model || *model != "gpt2") {
      throw BadCheckpoint(
          "{}: key 'tokenizer.ggml.model' is '{}'{} (allowed: gpt2, the byte-level BPE)", file.source(),
          model.value_or("absent"),
          model == "llama" ? ", a SentencePiece tokenizer, which titanium does not have" : "");
    }
    tokens_ = required("tokens");
    merges_ = required("merges");
    const auto count = static_cast<int64_t>(tokens_.size());
    if (count > vocab_size) {
      throw BadCheckpoint("{}: lists {} tokens, the embedding has {} rows", file.source(), count, vocab_size);
    }
    types_ =
        file.integers("tokenizer.ggml.token_type").value_or(std::vector<int64_t>(tokens_.size(), kNormal));
    if (types_.size() != tokens_.size()) {
      throw BadCheckpoint("{}: lists {} tokens and {} token types", file.source(), tokens_.size(),
                          types_.size());
    }
    ids_.reserve(tokens_.size());
    for (size_t i = 0; i < tokens_.size(); ++i) {
      if (is_padding(i)) continue;
      if (tokens_[i].empty()) throw BadCheckpoint("{}: token {} is the empty text", file.source(), i);
      const auto [at, fresh] = ids_.emplace(tokens_[i], i);
      if (!fresh) {
        throw BadCheckpoint("{}: tokens {} and {} are both '{}'", file.source(), at->second, i, tokens_[i]);
      }
    }
  }

  HfTokenizer describe(int64_t context_length) const {
    const PreTokenizer pre = pre_tokenizer(file_);
    const bool add_bos = file_.boolean("tokenizer.ggml.add_bos_token").value_or(pre.add_bos);
    const bool add_eos = file_.boolean("tokenizer.ggml.add_eos_token").value_or(false);

    HfTokenizer out;
    std::string& text = out.tokenizer_json;
    text = R"({"version":"1.0","truncation":null,"padding":null,"added_tokens":)" + added_tokens().dump();
    text += R"(,"normalizer":)" + pre.normalizer.dump() + R"(,"pre_tokenizer":)" + pre.pre_tokenizer.dump();
    text += R"(,"post_processor":)" + post_processor(add_bos, add_eos).dump();
    text += R"(,"decoder":{"type":"ByteLevel","add_prefix_space":true,"trim_offsets":true,"use_regex":true})";
    text += R"(,"model":{"type":"BPE","dropout":null,"unk_token":null,"continuing_subword_prefix":"",)";
    text += R"("end_of_word_suffix":"","fuse_unk":false,"byte_fallback":false,"ignore_merges":)";
    text += pre.ignore_merges ? "true" : "false";
    write_vocab(text);
    write_merges(text);
    text += "}}\n";

    Json& config = out.tokenizer_config;
    config = {{"add_bos_token", add_bos},
              {"add_prefix_space", false},
              {"clean_up_tokenization_spaces", false},
              {"model_max_length", context_length},
              {"tokenizer_class", "PreTrainedTokenizerFast"}};
    if (add_eos) config["add_eos_token"] = true;
    for (const auto& [key, name] : {std::pair{"bos_token", "bos"},
                                    {"eos_token", "eos"},
                                    {"pad_token", "padding"},
                                    {"unk_token", "unknown"}}) {
      if (const auto token = special(name)) config[key] = *token;
    }
    add_templates(config);
    return out;
  }

 private:
  std::vector<std::string_view> required(const char* what) const {
    const auto key = fmt::format("tokenizer.ggml.{}", what);
    auto list = file_.strings(key);
    if (!list || (list->empty() && std::string_view(what) == "tokens")) {
      throw BadCheckpoint("{}: has no key '{}'", file_.source(), key);
    }
    return std::move(*list);
  }

  // Rows that the embedding has beyond the vocabulary are listed as unused tokens named [PAD<id>].
  bool is_padding(size_t id) const {
    return types_[id] == kUnused && tokens_[id] == fmt::format("[PAD{}]", id);
  }

  std::string quoted(std::string_view text, const char* what, size_t at) const {
    try {
      return Json(text).dump();
    } catch (const Json::exception&) {
      throw BadCheckpoint("{}: {} {} is not valid UTF-8", file_.source(), what, at);
    }
  }

  std::optional<std::string> special(const char* name) const {
    const auto key = fmt::format("tokenizer.ggml.{}_token_id", name);
    const auto id = file_.integer(key);
    if (!id) return std::nullopt;
    if (*id < 0 || *id >= static_cast<int64_t>(tokens_.size()) || is_padding(static_cast<size_t>(*id))) {
      throw BadCheckpoint("{}: key '{}' is {}, which is no token (there are {})", file_.source(), key, *id,
                          tokens_.size());
    }
    quoted(tokens_[static_cast<size_t>(*id)], "token", static_cast<size_t>(*id));
    return std::string(tokens_[static_cast<size_t>(*id)]);
  }

  Json added_tokens() const {
    Json added = Json::array();
    for (size_t i = 0; i < tokens_.size(); ++i) {
      if (types_[i] == kNormal || types_[i] == kUnused) continue;
      if (types_[i] < kNormal || types_[i] >= kByte) {
        throw BadCheckpoint("{}: token {} has type {} (allowed in a byte-level BPE: 1 to 5)", file_.source(),
                            i, types_[i]);
      }
      quoted(tokens_[i], "token", i);
      added.push_back({{"id", i},
                       {"content", tokens_[i]},
                       {"single_word", false},
                       {"lstrip", false},
                       {"rstrip", false},
                       {"normalized", false},
                       {"special", types_[i] != kUserDefined}});
    }
    return added;
  }

  Json post_processor(bool add_bos, bool add_eos) const {
    Json tokens = Json::object();
    const auto marker = [&](const char* name, bool wanted, int64_t type_id) {
      Json list = Json::array();
      if (!wanted) return list;
      const auto token = special(name);
      if (!token) throw BadCheckpoint("{}: adds a {} token but does not name one", file_.source(), name);
      tokens[*token] = {{"id", *token}, {"ids", {ids_.at(*token)}}, {"tokens", {*token}}};
      list.push_back({{"SpecialToken", {{"id", *token}, {"type_id", type_id}}}});
      return list;
    };
    const auto sequence = [&](const char* id, int64_t type_id) {
      Json list = marker("bos", add_bos, type_id);
      list.push_back({{"Sequence", {{"id", id}, {"type_id", type_id}}}});
      for (Json& item : marker("eos", add_eos, type_id)) list.push_back(std::move(item));
      return list;
    };
    Json single = sequence("A", 0), pair = single;
    for (Json& item : sequence("B", 1)) pair.push_back(std::move(item));
    return {{"type", "TemplateProcessing"}, {"single", single}, {"pair", pair}, {"special_tokens", tokens}};
  }

  void write_vocab(std::string& text) const {
    text += R"(,"vocab":{)";
    for (size_t i = 0; i < tokens_.size(); ++i) {
      if (is_padding(i)) continue;
      if (text.back() != '{') text += ',';
      text.append(quoted(tokens_[i], "token", i)).append(":").append(std::to_string(i));
    }
    text += "}";
  }

  void write_merges(std::string& text) const {
    text += R"(,"merges":[)";
    for (size_t i = 0; i < merges_.size(); ++i) {
      const std::string_view merge = merges_[i];
      const size_t space = merge.find(' ', 1);
      const std::string_view left = merge.substr(0, space);
      const std::string_view right = space == merge.npos ? "" : merge.substr(space + 1);
      if (right.empty() || !ids_.count(left) || !ids_.count(right) ||
          !ids_.count(std::string(left) + std::string(right))) {
        throw BadCheckpoint("{}: merge {} is '{}', not two tokens that together are a token", file_.source(),
                            i, merge);
      }
      text += i == 0 ? "[" : ",[";
      text.append(quoted(left, "merge", i)).append(",").append(quoted(right, "merge", i)).append("]");
    }
    text += "]";
  }

  void add_templates(Json& config) const {
    const auto plain = file_.string("tokenizer.chat_template");
    const auto names = file_.strings("tokenizer.chat_templates");
    if (plain) quoted(*plain, "chat template", 0);
    if (!names || names->empty()) {
      if (plain) config["chat_template"] = *plain;
      return;
    }
    Json list = Json::array();
    if (plain) list.push_back({{"name", "default"}, {"template", *plain}});
    for (size_t i = 0; i < names->size(); ++i) {
      const auto key = fmt::format("tokenizer.chat_template.{}", (*names)[i]);
      const auto body = file_.string(key);
      if (!body)
        throw BadCheckpoint("{}: has no key '{}', which tokenizer.chat_templates lists", file_.source(), key);
      quoted((*names)[i], "chat template name", i);
      quoted(*body, "chat template", i + 1);
      list.push_back({{"name", (*names)[i]}, {"template", *body}});
    }
    config["chat_template"] = list;
  }

  const GgufFile& file_;
  std::vector<std::string_view> tokens_, merges_;
  std::vector<int64_t> types_;
  std::unordered_map<std::string_view, size_t> ids_;
};

}  // namespace

HfTokenizer describe_tokenizer(const GgufFile& file, int64_t vocab_size, int64_t context_length) {
  return Describer(file, vocab_size).describe(context_length);
}

}  // namespace titanium

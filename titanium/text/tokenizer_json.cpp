// Reads tokenizer.json.  What is not understood is refused by key and value.
#include <algorithm>
#include <initializer_list>

#include "titanium/base/error.h"
#include "titanium/formats/json.h"
#include "titanium/text/byte_alphabet.h"
#include "titanium/text/nfc.h"
#include "titanium/text/tokenizer_impl.h"

namespace titanium {
namespace {

constexpr int kMaxNesting = 16;  // of Sequences

// A JSON value with its place in the file, for messages.
struct Node {
  const Json& value;
  std::string where;  // "tokenizer.json: model.vocab"

  std::string shown() const {
    std::string text = value.dump(-1, ' ', false, Json::error_handler_t::replace);
    if (text.size() > 200) text = text.substr(0, 200) + "...";
    return text;
  }
  [[noreturn]] void refuse(std::string_view allowed) const {
    throw BadConfig("{} is {}, which is not supported; {}", where, shown(), allowed);
  }
  bool has(const char* key) const { return value.contains(key) && !value[key].is_null(); }
  std::string path(std::string_view key) const {
    return where + (where.ends_with(": ") ? "" : ".") + std::string(key);
  }
  Node at(const char* key) const {
    object();
    if (!value.contains(key)) throw BadConfig("{} is missing", path(key));
    return {value[key], path(key)};
  }
  Node at(size_t index) const { return {value[index], where + "[" + std::to_string(index) + "]"}; }
  const Json& object() const {
    if (!value.is_object()) refuse("an object is expected");
    return value;
  }
  const Json& array() const {
    if (!value.is_array()) refuse("an array is expected");
    return value;
  }
  std::string string() const {
    if (!value.is_string()) refuse("a string is expected");
    return value.get<std::string>();
  }
  bool boolean() const {
    if (!value.is_boolean()) refuse("true or false is expected");
    return value.get<bool>();
  }
  bool boolean(const char* key, bool otherwise) const { return has(key) ? at(key).boolean() : otherwise; }
  int64_t id() const {
    if (!value.is_number_integer() || value.get<double>() < 0 || value.get<double>() > double{kMaxTokenId})
      refuse("an id from 0 to " + std::to_string(kMaxTokenId) + " is expected");
    return value.get<int64_t>();
  }
  void only(std::initializer_list<std::string_view> keys) const {
    for (const auto& [key, inner] : object().items())
      if (std::find(keys.begin(), keys.end(), key) == keys.end())
        Node{inner, path(key)}.refuse("the key is not known here");
  }
  std::string type() const { return at("type").string(); }
};

class Reader {
 public:
  Reader(const Json& json, const std::string& name, Tokenizer::Impl& impl) : root_{json, name}, impl_(impl) {}

  void read() {
    root_.only({"version", "truncation", "padding", "added_tokens", "normalizer", "pre_tokenizer",
                "post_processor", "decoder", "model"});
    if (root_.has("truncation")) root_.at("truncation").refuse("only null is: nothing is cut silently");
    if (root_.has("padding") && root_.at("padding").at("strategy").value != "BatchLongest")
      root_.at("padding").refuse("only null is, or the strategy BatchLongest, which one text does not feel");
    if (root_.has("normalizer")) normalizer(root_.at("normalizer"), 0);
    pre_tokenizer();
    if (!root_.has("decoder")) throw BadConfig("{} is missing; ByteLevel is expected", root_.path("decoder"));
    decoder(root_.at("decoder"), 0);
    model(root_.at("model"));
    if (root_.has("added_tokens")) added_tokens(root_.at("added_tokens"));
    if (root_.has("post_processor")) post_processor(root_.at("post_processor"), 0);
  }

 private:
  static void nesting(const Node& node, int depth) {
    if (depth > kMaxNesting) throw BadConfig("{}: Sequences nested deeper than {}", node.where, kMaxNesting);
  }

  void normalizer(const Node& node, int depth) {
    nesting(node, depth);
    const std::string type = node.type();
    if (type == "NFC") {
      node.only({"type"});
      impl_.nfc = true;
    } else if (type == "Sequence") {
      node.only({"type", "normalizers"});
      const Node inner = node.at("normalizers");
      for (size_t i = 0; i < inner.array().size(); ++i) normalizer(inner.at(i), depth + 1);
    } else {
      node.at("type").refuse("supported are NFC, Sequence and null");
    }
  }

  void pre_tokenizer() {
    if (!root_.has("pre_tokenizer"))
      throw BadConfig("{} is null; only byte-level tokenizers are supported, which have ByteLevel there",
                      root_.path("pre_tokenizer"));
    const Node node = root_.at("pre_tokenizer");
    pre_step(node, 0);
    if (!byte_level_) node.refuse("a ByteLevel step is expected: only byte-level tokenizers are supported");
  }

  void pre_step(const Node& node, int depth) {
    nesting(node, depth);
    const std::string type = node.type();
    if (type == "Sequence") {
      node.only({"type", "pretokenizers"});
      const Node inner = node.at("pretokenizers");
      for (size_t i = 0; i < inner.array().size(); ++i) pre_step(inner.at(i), depth + 1);
      return;
    }
    if (byte_level_) node.refuse("nothing is after ByteLevel");
    if (type == "Digits") {
      node.only({"type", "individual_digits"});
      impl_.before_prefix.push_back(SplitStep::digits(node.boolean("individual_digits", false)));
    } else if (type == "Split") {
      node.only({"type", "pattern", "behavior", "invert"});
      impl_.before_prefix.push_back(split(node));
    } else if (type == "ByteLevel") {
      node.only({"type", "add_prefix_space", "trim_offsets", "use_regex"});
      byte_level_ = true;
      impl_.add_prefix_space = node.boolean("add_prefix_space", true);
      if (node.boolean("use_regex", true))
        (impl_.add_prefix_space ? impl_.after_prefix : impl_.before_prefix)
            .push_back(SplitStep::from_pattern(kGpt2Pattern, SplitBehavior::kIsolated, false, node.where));
    } else {
      node.at("type").refuse("supported are Sequence, Digits, Split and ByteLevel");
    }
    if (impl_.before_prefix.size() > kMaxNesting) node.refuse("the Sequence is too long");
  }

  static SplitStep split(const Node& node) {
    const Node pattern = node.at("pattern");
    pattern.only({"Regex", "String"});
    if (pattern.value.size() != 1) pattern.refuse("one of Regex and String is expected");
    const std::string behavior = node.at("behavior").string();
    SplitBehavior how{};
    if (behavior == "Removed")
      how = SplitBehavior::kRemoved;
    else if (behavior == "Isolated")
      how = SplitBehavior::kIsolated;
    else if (behavior == "MergedWithPrevious")
      how = SplitBehavior::kMergedWithPrevious;
    else if (behavior == "MergedWithNext")
      how = SplitBehavior::kMergedWithNext;
    else if (behavior == "Contiguous")
      how = SplitBehavior::kContiguous;
    else
      node.at("behavior")
          .refuse("supported are Removed, Isolated, MergedWithPrevious, MergedWithNext and Contiguous");
    const bool invert = node.boolean("invert", false);
    if (pattern.has("Regex"))
      return SplitStep::from_pattern(pattern.at("Regex").string(), how, invert, pattern.at("Regex").where);
    const Node literal = pattern.at("String");
    std::string escaped;
    for (const char c : literal.string()) {
      if (static_cast<uint8_t>(c) < 0x80 && std::ispunct(static_cast<unsigned char>(c))) escaped += '\\';
      escaped += c;
    }
    if (escaped.empty()) literal.refuse("an empty String splits nothing");
    return SplitStep::with_regex(escaped, how, invert, literal.where);
  }

  void decoder(const Node& node, int depth) {
    nesting(node, depth);
    const std::string type = node.type();
    if (type == "Sequence") {
      node.only({"type", "decoders"});
      const Node inner = node.at("decoders");
      if (inner.array().size() != 1) inner.refuse("one ByteLevel is expected");
      decoder(inner.at(size_t{0}), depth + 1);
    } else if (type == "ByteLevel") {
      node.only({"type", "add_prefix_space", "trim_offsets", "use_regex"});
    } else {
      node.at("type").refuse("supported are ByteLevel and a Sequence of it");
    }
  }

  void model(const Node& node) {
    node.only({"type", "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk",
               "byte_fallback", "ignore_merges", "vocab", "merges"});
    if (node.has("type") && node.type() != "BPE") node.at("type").refuse("only BPE is");
    if (node.has("dropout") && node.value["dropout"] != 0.0)
      node.at("dropout").refuse("only null is: tokens must not be random");
    for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"})
      if (node.has(key) && !node.at(key).string().empty()) node.at(key).refuse("only null and \"\" are");
    if (node.boolean("byte_fallback", false)) node.at("byte_fallback").refuse("only false is");

    const Node vocab = node.at("vocab");
    std::vector<Bpe::Word> words;
    words.reserve(vocab.object().size());
    std::string bytes;
    for (const auto& [text, id] : vocab.value.items()) {
      const int64_t number = Node{id, vocab.where}.id();
      impl_.add_vocabulary_token(text, number, alphabet_, vocab.where);
      if (alphabet_.to_bytes(text, &bytes)) words.push_back({static_cast<int32_t>(number), bytes});
    }
    std::array<int32_t, 256> byte_ids;
    for (int b = 0; b < 256; ++b) {
      const auto found = impl_.ids.find(alphabet_.character(static_cast<uint8_t>(b)));
      byte_ids[static_cast<size_t>(b)] =
          found == impl_.ids.end() ? Bpe::kNone : static_cast<int32_t>(found->second);
    }
    int32_t unknown = Bpe::kNone;
    if (node.has("unk_token")) {
      const auto found = impl_.ids.find(node.at("unk_token").string());
      if (found == impl_.ids.end()) node.at("unk_token").refuse("it is not in the vocabulary");
      unknown = static_cast<int32_t>(found->second);
    }
    impl_.bpe.emplace(words, merges(node.at("merges")), byte_ids, unknown, node.boolean("fuse_unk", false),
                      node.boolean("ignore_merges", false));
  }

  std::vector<Bpe::Merge> merges(const Node& node) const {
    std::vector<Bpe::Merge> out;
    out.reserve(node.array().size());
    auto id_of = [&](const std::string& text, const Node& merge) {
      const auto found = impl_.ids.find(text);
      if (found == impl_.ids.end()) merge.refuse("'" + text + "' is not in the vocabulary");
      return static_cast<int32_t>(found->second);
    };
    for (size_t i = 0; i < node.value.size(); ++i) {
      const Json& value = node.value[i];
      std::string left, right;
      if (value.is_string()) {
        const std::string& text = value.get_ref<const std::string&>();
        if (text.starts_with("#version")) continue;
        const size_t space = text.find(' ');
        if (space == std::string::npos || text.find(' ', space + 1) != std::string::npos)
          node.at(i).refuse("two tokens with one space between are expected");
        left = text.substr(0, space);
        right = text.substr(space + 1);
      } else if (value.is_array() && value.size() == 2 && value[0].is_string() && value[1].is_string()) {
        left = value[0].get<std::string>();
        right = value[1].get<std::string>();
      } else {
        node.at(i).refuse("a string or a pair of strings is expected");
      }
      const Node merge{value, ""};
      if (!impl_.ids.contains(left) || !impl_.ids.contains(right) || !impl_.ids.contains(left + right))
        node.at(i).refuse("its parts and the whole must be in the vocabulary");
      out.push_back({id_of(left, merge), id_of(right, merge), id_of(left + right, merge)});
    }
    return out;
  }

  void added_tokens(const Node& node) {
    for (size_t i = 0; i < node.array().size(); ++i) {
      const Node entry = node.at(i);
      entry.only({"id", "content", "single_word", "lstrip", "rstrip", "normalized", "special"});
      AddedToken token;
      token.id = entry.at("id").id();
      token.content = entry.at("content").string();
      token.special = entry.boolean("special", false);
      token.single_word = entry.boolean("single_word", false);
      token.lstrip = entry.boolean("lstrip", false);
      token.rstrip = entry.boolean("rstrip", false);
      token.normalized = entry.boolean("normalized", !token.special);
      impl_.add_added_token(token, alphabet_, entry.where);
    }
  }

  void post_processor(const Node& node, int depth) {
    nesting(node, depth);
    const std::string type = node.type();
    if (type == "ByteLevel") {  // trims offsets; ids are not touched
      node.only({"type", "add_prefix_space", "trim_offsets", "use_regex"});
    } else if (type == "Sequence") {
      node.only({"type", "processors"});
      const Node inner = node.at("processors");
      for (size_t i = 0; i < inner.array().size(); ++i) post_processor(inner.at(i), depth + 1);
    } else if (type == "TemplateProcessing") {
      node.only({"type", "single", "pair", "special_tokens"});
      template_processing(node);
    } else {
      node.at("type").refuse("supported are ByteLevel, TemplateProcessing, Sequence and null");
    }
  }

  void template_processing(const Node& node) {
    const Node single = node.at("single");
    std::vector<int64_t> before, after;
    bool seen = false;
    for (size_t i = 0; i < single.array().size(); ++i) {
      const Node piece = single.at(i);
      piece.only({"SpecialToken", "Sequence"});
      if (piece.has("Sequence")) {
        if (seen || piece.at("Sequence").at("id").value != "A")
          piece.refuse("the sequence A once is expected");
        seen = true;
        continue;
      }
      const std::string token = piece.at("SpecialToken").at("id").string();
      const Node table = node.at("special_tokens");
      if (!table.object().contains(token)) piece.refuse("special_tokens does not have it");
      const Node ids = table.at(token.c_str()).at("ids");
      for (size_t k = 0; k < ids.array().size(); ++k) {
        const int64_t id = ids.at(k).id();
        if (id >= static_cast<int64_t>(impl_.tokens.size()) || !impl_.tokens[static_cast<size_t>(id)].used)
          ids.at(k).refuse("it is not the id of a token");
        (seen ? after : before).push_back(id);
      }
    }
    if (!seen) single.refuse("the sequence A is expected in it");
    impl_.prefix.insert(impl_.prefix.begin(), before.begin(), before.end());
    impl_.suffix.insert(impl_.suffix.end(), after.begin(), after.end());
  }

  const Node root_;
  Tokenizer::Impl& impl_;
  ByteAlphabet alphabet_;
  bool byte_level_ = false;
};

}  // namespace

void Tokenizer::Impl::add_vocabulary_token(const std::string& text, int64_t id, const ByteAlphabet& alphabet,
                                           const std::string& where) {
  if (static_cast<size_t>(id) >= tokens.size()) tokens.resize(static_cast<size_t>(id) + 1);
  Token& token = tokens[static_cast<size_t>(id)];
  if (token.used) throw BadConfig("{}: the id {} of '{}' is taken by another token", where, id, text);
  if (!ids.emplace(text, id).second) throw BadConfig("{}: the token '{}' has two ids", where, text);
  std::string bytes;
  if (!alphabet.to_bytes(text, &bytes)) bytes = text;
  token = {true, false, static_cast<uint32_t>(token_bytes.size()), static_cast<uint32_t>(bytes.size())};
  token_bytes += bytes;
}

void Tokenizer::Impl::add_added_token(const AddedToken& token, const ByteAlphabet& alphabet,
                                      const std::string& where) {
  if (token.content.empty()) throw BadConfig("{}.content is empty", where);
  const auto known = ids.find(token.content);
  if (known == ids.end())
    add_vocabulary_token(token.content, token.id, alphabet, where);
  else if (known->second != token.id)
    throw BadConfig("{}: '{}' has the id {} here and {} in the vocabulary", where, token.content, token.id,
                    known->second);
  tokens[static_cast<size_t>(token.id)].special |= token.special;
  if (!token.normalized)
    added_raw.add(token, token.content);
  else if (const Normalized content = nfc ? titanium::nfc(token.content, properties) : Normalized{};
           content.changed)
    added_normalized.add(token, content.text);
  else
    added_normalized.add(token, token.content);
}

void read_tokenizer_json(std::string_view json, const std::string& name, Tokenizer::Impl& impl) {
  impl.name = name;
  const Json parsed = parse_json(json, name);
  Reader(parsed, name + ": ", impl).read();
}

Tokenizer Tokenizer::from_json(std::string_view json, const std::string& name) {
  auto impl = std::make_unique<Impl>();
  read_tokenizer_json(json, name, *impl);
  return Tokenizer(std::move(impl));
}

Tokenizer Tokenizer::from_file(const std::filesystem::path& tokenizer_json) {
  return from_json(read_file(tokenizer_json), tokenizer_json.string());
}

}  // namespace titanium

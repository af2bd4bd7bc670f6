// Byte-level BPE as Hugging Face's tokenizer.json describes it: same ids, and for each token the bytes of the
// input that it stands for.
#pragma once
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace titanium {

// Bytes [begin, end) of a text.
struct ByteSpan {
  int64_t begin = 0, end = 0;
  bool operator==(const ByteSpan&) const = default;
};

struct Encoding {
  std::vector<int64_t> ids;  // [N]
  std::vector<ByteSpan>
      spans;  // [N], bytes of the input.  Ascending; empty for tokens that the post-processor adds.
              // Tokens that share a character each have their own bytes of it, except where the
              // normalizer rewrote it: then each has the whole original character.
  int64_t dropped_bytes =
      0;  // bytes that the vocabulary has no token for and that HF's rule drops (no unk_token)
};

// What the files beside tokenizer.json say.  Ids are empty where the folder does not name the token.
struct SpecialTokens {
  std::optional<int64_t> bos, eos, pad, unk;
  std::vector<int64_t> stop;  // ids that end a generation: generation_config.json's eos_token_id, else {eos}
};

class Tokenizer {
 public:
  struct Impl;  // tokenizer_impl.h

  // All three throw BadConfig that names the file, the key and its value for anything that is not supported
  // or not well-formed.  `name` is what messages call the bytes.
  static Tokenizer from_json(std::string_view json, const std::string& name = "tokenizer.json");
  static Tokenizer from_file(const std::filesystem::path& tokenizer_json);
  // A Hugging Face folder: tokenizer.json, and where present tokenizer_config.json, special_tokens_map.json,
  // generation_config.json, chat_template.jinja, additional_chat_templates/*.jinja.  Whether BOS and EOS are
  // added is the post-processor's to say: add_bos_token and add_eos_token do nothing beside a tokenizer.json,
  // as in transformers 5.
  static Tokenizer from_folder(const std::filesystem::path& folder);

  Tokenizer(Tokenizer&&) noexcept;
  Tokenizer& operator=(Tokenizer&&) noexcept;
  ~Tokenizer();

  // Text must be UTF-8: BadData names the first bad byte.  `add_special_tokens` runs the post-processor (BOS
  // where the tokenizer has that rule).  Special-token text inside `text` becomes the special token (HF's
  // rule).  Thread-safe.
  Encoding encode(std::string_view text, bool add_special_tokens = false) const;

  // Bytes that are not UTF-8 become U+FFFD, one for each maximal bad piece.  BadData for an id that is not a
  // token.
  std::string decode(const std::vector<int64_t>& ids, bool skip_special = false) const;

  std::optional<int64_t> id(std::string_view token) const;  // of a token as written in tokenizer.json
  std::string token_bytes(int64_t id) const;                // what the token decodes to, before UTF-8 repair
  bool is_token(int64_t id) const;
  bool is_special(int64_t id) const;
  int64_t vocab_size() const;  // largest id + 1

  const SpecialTokens& special() const;
  std::string special_text(std::optional<int64_t> id) const;  // "" for an empty id

  // Templates by name; the one without a name is "default".  Empty if the folder has none.
  const std::map<std::string, std::string>& chat_templates() const;

 private:
  explicit Tokenizer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// Decodes token by token and gives out complete characters only.  All pieces together equal decode() of all
// ids.
class StreamDecoder {
 public:
  explicit StreamDecoder(const Tokenizer& tokenizer, bool skip_special = false);  // keeps a reference
  std::string push(int64_t id);  // the text that is now certain; may be empty
  std::string finish();          // what is left: an incomplete character becomes U+FFFD

 private:
  const Tokenizer& tokenizer_;
  bool skip_special_;
  std::string pending_;  // start of a character
};

}  // namespace titanium

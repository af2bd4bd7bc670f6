// Inside of Tokenizer, shared by the files that read and that run it.
#pragma once
#include <map>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "titanium/text/added_tokens.h"
#include "titanium/text/bpe.h"
#include "titanium/text/byte_alphabet.h"
#include "titanium/text/pretokenize.h"
#include "titanium/text/tokenizer.h"
#include "titanium/text/unicode.h"

namespace titanium {

struct Tokenizer::Impl {
  struct Token {
    bool used = false, special = false;
    uint32_t offset = 0, size = 0;  // in token_bytes
  };

  std::string name;  // of tokenizer.json, for messages
  unicode::Properties properties;
  AddedTokenMatcher added_raw, added_normalized;
  bool nfc = false;
  std::vector<SplitStep> before_prefix, after_prefix;  // add_prefix_space acts between them
  bool add_prefix_space = false;
  std::optional<Bpe> bpe;
  std::vector<int64_t> prefix, suffix;  // of add_special_tokens

  std::vector<Token> tokens;  // [vocab_size]
  std::string token_bytes;
  std::unordered_map<std::string, int64_t> ids;

  SpecialTokens special;
  std::map<std::string, std::string> chat_templates;

  // BadConfig with `where` in front if the id or the text is taken by another token.
  void add_vocabulary_token(const std::string& text, int64_t id, const ByteAlphabet& alphabet,
                            const std::string& where);
  void add_added_token(const AddedToken& token, const ByteAlphabet& alphabet, const std::string& where);
};

constexpr int64_t kMaxTokenId = (int64_t{1} << 22) - 1;

// Fills what tokenizer.json says.
void read_tokenizer_json(std::string_view json, const std::string& name, Tokenizer::Impl& impl);

}  // namespace titanium

// Added tokens (special or not): found in a text before anything else cuts it.
#pragma once
#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "titanium/text/unicode.h"

namespace titanium {

struct AddedToken {
  int64_t id = 0;
  std::string content;
  bool special = false, single_word = false, lstrip = false, rstrip = false, normalized = true;
};

// Leftmost, then longest; with the rules of single_word, lstrip and rstrip as in Hugging Face's tokenizers
// (added_vocabulary.rs, find_matches).
class AddedTokenMatcher {
 public:
  struct Piece {
    int64_t id;  // -1: text between tokens
    size_t begin, end;
  };

  void add(const AddedToken& token, std::string_view content);
  bool empty() const { return tokens_.empty(); }
  // Pieces cover the text, in order, none empty.
  std::vector<Piece> split(std::string_view text, const unicode::Properties& properties) const;

 private:
  struct Node {
    std::vector<std::pair<uint8_t, uint32_t>> next;
    int32_t token = -1;  // index into tokens_
  };
  uint32_t child(uint32_t node, uint8_t byte) const;  // 0 if none

  std::vector<Node> nodes_ = std::vector<Node>(1);
  std::array<bool, 256> first_{};  // bytes that begin a token
  std::vector<AddedToken> tokens_;
};

}  // namespace titanium

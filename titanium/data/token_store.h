// Many token sequences with their loss masks, compactly: 4 bytes and 1 bit a token, 8 bytes a sequence.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "titanium/batch/sample.h"

namespace titanium {

// A run of sequences that is filled once.
class TokenBlock {
 public:
  void add(std::span<const int32_t> ids, std::span<const uint8_t> loss_mask);  // equal lengths
  int64_t size() const { return static_cast<int64_t>(bounds_.size()) - 1; }
  int64_t length(int64_t i) const;
  Sample sample(int64_t i) const;
  // For another process of the run, and back.  Bug for what bytes() does not give.
  std::string bytes() const;
  static TokenBlock from(std::string_view bytes);
  void shrink();  // gives back what the vectors hold beyond their contents
  int64_t memory_bytes() const;

 private:
  std::vector<int32_t> ids_;
  std::vector<uint64_t> mask_;  // one bit a token
  std::vector<int64_t> bounds_{0};
};

// Blocks in a row.  Blocks are moved in, so that the whole is never copied.
class TokenStore {
 public:
  void append(TokenBlock block);
  int64_t size() const { return first_.back(); }
  int64_t length(int64_t i) const;
  Sample sample(int64_t i) const;
  int64_t memory_bytes() const;

 private:
  std::pair<const TokenBlock*, int64_t> find(int64_t i) const;  // Bug out of range

  std::vector<TokenBlock> blocks_;
  std::vector<int64_t> first_{0};  // number of the first sequence of each block, then size()
};

}  // namespace titanium

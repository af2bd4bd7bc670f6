// Byte-pair merging of one piece.  Const after construction, without a cache: thread-safe.
#pragma once
#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace titanium {

class Bpe {
 public:
  struct Word {  // a token of the model's vocabulary, as bytes
    int32_t id;
    std::string bytes;
  };
  struct Merge {  // in order of rank
    int32_t left, right, merged;
  };
  struct Symbol {
    int32_t id;
    uint32_t begin, end;  // bytes of the piece
  };
  static constexpr int32_t kNone = -1;

  // `byte_ids[b]` is the token of the single byte b, or kNone; `unknown` stands in for such bytes, and with
  // kNone they are dropped.  `whole_first` is tokenizer.json's ignore_merges.
  Bpe(const std::vector<Word>& words, const std::vector<Merge>& merges,
      const std::array<int32_t, 256>& byte_ids, int32_t unknown, bool fuse_unknown, bool whole_first);

  // Appends the tokens of `piece` (at most 4 GiB) to `out`; returns how many bytes were dropped.
  int64_t encode(std::string_view piece, std::vector<Symbol>& out) const;

 private:
  struct MergeSlot {
    uint64_t pair;  // left << 32 | right
    uint32_t rank;
    int32_t merged;
  };
  struct WordSlot {
    uint64_t hash;
    uint32_t offset, size;  // in word_bytes_
    int32_t id;
  };

  const MergeSlot* find_merge(int32_t left, int32_t right) const;
  int32_t find_word(std::string_view bytes) const;
  void insert_word(std::string_view bytes, int32_t id);
  int64_t merge_all(std::string_view piece, std::vector<Symbol>& out) const;
  void merge_short(std::vector<Symbol>& symbols, size_t first) const;
  void merge_long(std::vector<Symbol>& symbols, size_t first) const;

  std::array<int32_t, 256> byte_ids_;
  int32_t unknown_;
  bool fuse_unknown_;
  std::vector<MergeSlot> merges_;  // open addressing, a power of two
  // Pieces that become one token: all of the vocabulary with ignore_merges, else those that merging leads to.
  std::vector<WordSlot> words_;
  std::string word_bytes_;
};

}  // namespace titanium

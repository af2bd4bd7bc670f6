#include "titanium/text/bpe.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <queue>

#include "titanium/base/error.h"

namespace titanium {
namespace {

constexpr uint64_t kNoPair = ~uint64_t{0};
constexpr size_t kShort = 48;  // symbols; beyond it a heap beats the scan

uint64_t mix(uint64_t x) {  // finalizer of MurmurHash3
  x = (x ^ x >> 33) * 0xff51afd7ed558ccdULL;
  x = (x ^ x >> 33) * 0xc4ceb9fe1a85ec53ULL;
  return x ^ x >> 33;
}

uint64_t hash_bytes(std::string_view bytes) {
  uint64_t hash = bytes.size() * 0x9e3779b97f4a7c15ULL;
  const char* p = bytes.data();
  size_t left = bytes.size();
  for (; left >= 8; left -= 8, p += 8) {
    uint64_t word;
    std::memcpy(&word, p, 8);
    hash = mix(hash ^ word);
  }
  if (left > 0) {
    uint64_t word = 0;
    for (size_t i = 0; i < left; ++i) word |= static_cast<uint64_t>(static_cast<uint8_t>(p[i])) << (8 * i);
    hash = mix(hash ^ word);
  }
  return hash;
}

uint64_t pair_of(int32_t left, int32_t right) {
  return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
}

}  // namespace

Bpe::Bpe(const std::vector<Word>& words, const std::vector<Merge>& merges,
         const std::array<int32_t, 256>& byte_ids, int32_t unknown, bool fuse_unknown, bool whole_first)
    : byte_ids_(byte_ids), unknown_(unknown), fuse_unknown_(fuse_unknown) {
  merges_.assign(std::bit_ceil(2 * merges.size() + 2), MergeSlot{kNoPair, 0, 0});
  const size_t mask = merges_.size() - 1;
  for (size_t rank = 0; rank < merges.size(); ++rank) {
    const uint64_t pair = pair_of(merges[rank].left, merges[rank].right);
    size_t slot = mix(pair) & mask;
    while (merges_[slot].pair != kNoPair && merges_[slot].pair != pair) slot = (slot + 1) & mask;
    merges_[slot] = {pair, static_cast<uint32_t>(rank),
                     merges[rank].merged};  // a repeated pair: the last holds
  }

  words_.assign(std::bit_ceil(2 * words.size() + 2), WordSlot{0, 0, 0, kNone});
  std::vector<Symbol> symbols;
  std::vector<const Word*> whole;
  for (const Word& word : words) {
    if (word.bytes.empty()) continue;
    symbols.clear();
    const bool reached =
        merge_all(word.bytes, symbols) == 0 && symbols.size() == 1 && symbols[0].id == word.id;
    if (whole_first || reached) whole.push_back(&word);
  }
  for (const Word* word : whole) insert_word(word->bytes, word->id);
}

void Bpe::insert_word(std::string_view bytes, int32_t id) {
  const uint64_t hash = hash_bytes(bytes);
  size_t slot = hash & (words_.size() - 1);
  while (words_[slot].id != kNone) slot = (slot + 1) & (words_.size() - 1);
  if (word_bytes_.size() + bytes.size() > UINT32_MAX) throw BadConfig("the vocabulary is larger than 4 GiB");
  words_[slot] = {hash, static_cast<uint32_t>(word_bytes_.size()), static_cast<uint32_t>(bytes.size()), id};
  word_bytes_ += bytes;
}

int32_t Bpe::find_word(std::string_view bytes) const {
  const uint64_t hash = hash_bytes(bytes);
  for (size_t slot = hash & (words_.size() - 1); words_[slot].id != kNone;
       slot = (slot + 1) & (words_.size() - 1)) {
    const WordSlot& word = words_[slot];
    if (word.hash == hash && word.size == bytes.size() &&
        std::memcmp(word_bytes_.data() + word.offset, bytes.data(), bytes.size()) == 0)
      return word.id;
  }
  return kNone;
}

const Bpe::MergeSlot* Bpe::find_merge(int32_t left, int32_t right) const {
  const uint64_t pair = pair_of(left, right);
  const size_t mask = merges_.size() - 1;
  for (size_t slot = mix(pair) & mask; merges_[slot].pair != kNoPair; slot = (slot + 1) & mask)
    if (merges_[slot].pair == pair) return &merges_[slot];
  return nullptr;
}

int64_t Bpe::encode(std::string_view piece, std::vector<Symbol>& out) const {
  const int32_t whole = find_word(piece);
  if (whole == kNone) return merge_all(piece, out);
  out.push_back({whole, 0, static_cast<uint32_t>(piece.size())});
  return 0;
}

int64_t Bpe::merge_all(std::string_view piece, std::vector<Symbol>& out) const {
  if (piece.size() > UINT32_MAX) throw BadData("a piece of text without a break is larger than 4 GiB");
  const size_t first = out.size();
  int64_t dropped = 0;
  bool after_unknown = false;
  for (uint32_t i = 0; i < piece.size(); ++i) {
    const int32_t id = byte_ids_[static_cast<uint8_t>(piece[i])];
    if (id != kNone) {
      out.push_back({id, i, i + 1});
    } else if (unknown_ == kNone) {
      ++dropped;
    } else if (fuse_unknown_ && after_unknown) {
      out.back().end = i + 1;
    } else {
      out.push_back({unknown_, i, i + 1});
    }
    after_unknown = id == kNone && unknown_ != kNone;
  }
  if (out.size() - first <= kShort)
    merge_short(out, first);
  else
    merge_long(out, first);
  return dropped;
}

// The pair of lowest rank merges first, the leftmost of equals.
void Bpe::merge_short(std::vector<Symbol>& symbols, size_t first) const {
  std::array<const MergeSlot*, kShort> next;  // merge of symbol i with i + 1
  size_t count = symbols.size() - first;
  Symbol* s = symbols.data() + first;
  for (size_t i = 0; i + 1 < count; ++i) next[i] = find_merge(s[i].id, s[i + 1].id);
  while (count > 1) {
    size_t best = count;
    uint32_t rank = UINT32_MAX;
    for (size_t i = 0; i + 1 < count; ++i) {
      if (next[i] && next[i]->rank < rank) {
        rank = next[i]->rank;
        best = i;
      }
    }
    if (best == count) break;
    s[best].id = next[best]->merged;
    s[best].end = s[best + 1].end;
    --count;
    for (size_t i = best + 1; i < count; ++i) s[i] = s[i + 1];
    for (size_t i = best + 1; i + 1 < count; ++i) next[i] = next[i + 1];
    if (best + 1 < count) next[best] = find_merge(s[best].id, s[best + 1].id);
    if (best > 0) next[best - 1] = find_merge(s[best - 1].id, s[best].id);
  }
  symbols.resize(first + count);
}

void Bpe::merge_long(std::vector<Symbol>& symbols, size_t first) const {
  struct Candidate {
    uint32_t rank, at;  // the left symbol
    uint64_t pair;      // stale once the symbols are others
    int32_t merged;
    bool operator>(const Candidate& other) const {
      return rank != other.rank ? rank > other.rank : at > other.at;
    }
  };
  constexpr uint32_t kEnd = UINT32_MAX;
  Symbol* s = symbols.data() + first;
  const auto count = static_cast<uint32_t>(symbols.size() - first);
  std::vector<uint32_t> previous(count), next(count);
  std::vector<Candidate> heap;
  heap.reserve(count);
  auto candidate = [&](uint32_t left, uint32_t right) -> bool {
    const MergeSlot* merge = find_merge(s[left].id, s[right].id);
    if (merge) heap.push_back({merge->rank, left, merge->pair, merge->merged});
    return merge != nullptr;
  };
  for (uint32_t i = 0; i < count; ++i) {
    previous[i] = i == 0 ? kEnd : i - 1;
    next[i] = i + 1 == count ? kEnd : i + 1;
  }
  for (uint32_t i = 0; i + 1 < count; ++i) candidate(i, i + 1);
  std::make_heap(heap.begin(), heap.end(), std::greater<>());
  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end(), std::greater<>());
    const Candidate top = heap.back();
    heap.pop_back();
    const uint32_t left = top.at, right = next[left];
    if (s[left].id == kNone || right == kEnd || pair_of(s[left].id, s[right].id) != top.pair) continue;
    s[left].id = top.merged;
    s[left].end = s[right].end;
    s[right].id = kNone;
    next[left] = next[right];
    if (next[left] != kEnd) previous[next[left]] = left;
    if (previous[left] != kEnd && candidate(previous[left], left))
      std::push_heap(heap.begin(), heap.end(), std::greater<>());
    if (next[left] != kEnd && candidate(left, next[left]))
      std::push_heap(heap.begin(), heap.end(), std::greater<>());
  }
  symbols.erase(std::remove_if(symbols.begin() + static_cast<std::ptrdiff_t>(first), symbols.end(),
                               [](const Symbol& symbol) { return symbol.id == kNone; }),
                symbols.end());
}

}  // namespace titanium

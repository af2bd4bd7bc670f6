#include "titanium/data/token_store.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "titanium/base/error.h"

namespace titanium {

void TokenBlock::add(std::span<const int32_t> ids, std::span<const uint8_t> loss_mask) {
  if (ids.size() != loss_mask.size()) {
    throw Bug("{} ids but a loss mask of {}", ids.size(), loss_mask.size());
  }
  const size_t begin = ids_.size();
  ids_.insert(ids_.end(), ids.begin(), ids.end());
  mask_.resize((ids_.size() + 63) / 64);
  for (size_t i = 0; i < loss_mask.size(); ++i) {
    if (loss_mask[i]) mask_[(begin + i) / 64] |= uint64_t{1} << (begin + i) % 64;
  }
  bounds_.push_back(static_cast<int64_t>(ids_.size()));
}

int64_t TokenBlock::length(int64_t i) const {
  return bounds_[static_cast<size_t>(i) + 1] - bounds_[static_cast<size_t>(i)];
}

Sample TokenBlock::sample(int64_t i) const {
  const int64_t begin = bounds_[static_cast<size_t>(i)], end = bounds_[static_cast<size_t>(i) + 1];
  Sample sample;
  sample.ids.assign(ids_.begin() + begin, ids_.begin() + end);
  sample.loss_mask.reserve(sample.ids.size());
  for (auto t = static_cast<size_t>(begin); t < static_cast<size_t>(end); ++t) {
    sample.loss_mask.push_back(mask_[t / 64] >> t % 64 & 1);
  }
  return sample;
}

std::string TokenBlock::bytes() const {
  std::string out;
  const auto put = [&](const auto& values) {
    const size_t size = values.size();
    out.append(reinterpret_cast<const char*>(&size), sizeof size);
    out.append(reinterpret_cast<const char*>(values.data()), size * sizeof values[0]);
  };
  put(ids_);
  put(mask_);
  put(bounds_);
  return out;
}

TokenBlock TokenBlock::from(std::string_view bytes) {
  TokenBlock block;
  const auto take = [&](auto& values) {
    size_t size = 0;
    if (bytes.size() < sizeof size) throw Bug("a block of tokens ends too early");
    std::memcpy(&size, bytes.data(), sizeof size);
    bytes.remove_prefix(sizeof size);
    if (bytes.size() / sizeof values[0] < size) throw Bug("a block of tokens ends too early");
    values.resize(size);
    std::memcpy(values.data(), bytes.data(), size * sizeof values[0]);
    bytes.remove_prefix(size * sizeof values[0]);
  };
  take(block.ids_);
  take(block.mask_);
  take(block.bounds_);
  return block;
}

void TokenBlock::shrink() {
  ids_.shrink_to_fit();
  mask_.shrink_to_fit();
  bounds_.shrink_to_fit();
}

int64_t TokenBlock::memory_bytes() const {
  return static_cast<int64_t>(ids_.capacity() * sizeof(int32_t) + mask_.capacity() * sizeof(uint64_t) +
                              bounds_.capacity() * sizeof(int64_t));
}

void TokenStore::append(TokenBlock block) {
  if (block.size() == 0) return;
  first_.push_back(size() + block.size());
  blocks_.push_back(std::move(block));
}

std::pair<const TokenBlock*, int64_t> TokenStore::find(int64_t i) const {
  if (i < 0 || i >= size()) throw Bug("no sequence {} of {}", i, size());
  const auto next = std::upper_bound(first_.begin(), first_.end(), i);
  const auto block = static_cast<size_t>(next - first_.begin()) - 1;
  return {&blocks_[block], i - first_[block]};
}

int64_t TokenStore::length(int64_t i) const {
  const auto [block, at] = find(i);
  return block->length(at);
}

Sample TokenStore::sample(int64_t i) const {
  const auto [block, at] = find(i);
  return block->sample(at);
}

int64_t TokenStore::memory_bytes() const {
  int64_t bytes =
      static_cast<int64_t>(blocks_.capacity() * sizeof(TokenBlock) + first_.capacity() * sizeof(int64_t));
  for (const TokenBlock& block : blocks_) bytes += block.memory_bytes();
  return bytes;
}

}  // namespace titanium

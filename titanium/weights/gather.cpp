#include "titanium/weights/gather.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>

#include "titanium/weights/scalar_type.h"

namespace titanium {
namespace {

constexpr int64_t kAlign = 8;  // bytes: parts and rounds start at multiples, so that none cuts an element

// The slice's masters in `dtype`.
void pack(const Slice& slice, Dtype dtype, std::byte* to) {
  const at::Tensor values = slice.of(slice.unit->shard()).cpu();
  convert(static_cast<const std::byte*>(values.const_data_ptr()), to_dtype(values.scalar_type()), to, dtype,
          values.numel());
}

void unpack(const std::byte* from, const Slice& slice, Dtype dtype, std::byte* weight) {
  const int64_t width = size_of(dtype);
  slice.each_run([&](const Slice::Run& run) {
    std::memcpy(weight + run.global * width, from + run.begin * width,
                static_cast<size_t>(run.count * width));
  });
}

}  // namespace

Gatherer::Gatherer(const ParamStore& store, Group ranks, uint64_t memory)
    : ranks_(std::move(ranks)),
      memory_(static_cast<int64_t>(std::clamp<uint64_t>(memory, 1 << 16, 1 << 23))),
      slices_(ranks_.size()) {
  const Mesh& mesh = store.mesh();
  const std::vector<int> members =
      ranks_along(mesh.dims(), mesh.rank(), {.pp = true, .dp_shard = true, .cp = true, .tp = true});
  for (size_t rank = 0; rank < slices_.size(); ++rank) {
    for (const Slice& slice : store.slices_of(coordinates_of(mesh.dims(), members.at(rank))))
      slices_[rank].emplace(slice.weight, slice);
  }
}

std::vector<Gatherer::Row> Gatherer::rows_of(const std::vector<Target>& targets) const {
  std::vector<Row> rows(slices_.size());
  for (size_t rank = 0; rank < rows.size(); ++rank) {
    Row& row = rows[rank];
    for (size_t i = 0; i < targets.size(); ++i) {
      const auto found = slices_[rank].find(targets[i].weight);
      if (found == slices_[rank].end()) continue;
      const int64_t bytes = found->second.count() * size_of(targets[i].dtype);
      row.parts.push_back({i, found->second, row.bytes, bytes});
      row.bytes += (bytes + kAlign - 1) / kAlign * kAlign;
    }
  }
  return rows;
}

void Gatherer::each_in(const Row& row, const std::vector<Target>& targets, int64_t from, int64_t count,
                       const std::function<void(const Target&, const Slice&, int64_t)>& visit) {
  for (const Part& part : row.parts) {
    const int64_t begin = std::max(part.at, from), end = std::min(part.at + part.bytes, from + count);
    if (begin >= end) continue;
    const Target& target = targets[part.target];
    const int64_t width = size_of(target.dtype);
    Slice slice = part.slice;
    slice.begin += (begin - part.at) / width;
    slice.offset += (begin - part.at) / width;
    slice.end = slice.begin + (end - begin) / width;
    visit(target, slice, begin - from);
  }
}

std::byte* Gatherer::buffer(int64_t bytes) {
  if (!buffer_.defined() || buffer_.numel() < bytes) buffer_ = at::empty({bytes}, at::kByte);
  return static_cast<std::byte*>(buffer_.data_ptr());
}

void Gatherer::run(const std::vector<Target>& targets, Crew& crew) {
  const std::vector<Row> rows = rows_of(targets);
  int64_t longest = 0, all = 0;
  for (const Row& row : rows) {
    longest = std::max(longest, row.bytes);
    all += row.bytes;
  }
  const auto size = static_cast<int64_t>(rows.size());
  const bool at_once = size * longest <= all + all / 4;
  const int64_t room = at_once ? memory_ / size : memory_;
  const int64_t round = std::max(kAlign, std::min(longest, room) / kAlign * kAlign);
  const auto pack_own = [&](int64_t from, int64_t count, std::byte* to) {
    each_in(
        rows[ranks_.rank()], targets, from, count,
        [&](const Target& target, const Slice& slice, int64_t at) { pack(slice, target.dtype, to + at); });
  };
  const auto unpack_of = [&](int64_t rank, int64_t from, int64_t count, const std::byte* bytes) {
    each_in(rows[rank], targets, from, count, [&](const Target& target, const Slice& slice, int64_t at) {
      unpack(bytes + at, slice, target.dtype, target.to);
    });
  };
  std::byte* bytes = buffer(at_once ? size * round : round);
  for (int64_t from = 0; at_once && from < longest; from += round) {
    const int64_t count = std::min(round, longest - from);
    pack_own(from, count, bytes + ranks_.rank() * count);
    ranks_.all_gather(buffer_.narrow(0, 0, size * count));
    crew.run(size, [&](int64_t rank) { unpack_of(rank, from, count, bytes + rank * count); });
  }
  for (int64_t rank = 0; !at_once && rank < size; ++rank) {
    for (int64_t from = 0; from < rows[rank].bytes; from += round) {
      const int64_t count = std::min(round, rows[rank].bytes - from);
      if (rank == ranks_.rank()) pack_own(from, count, bytes);
      ranks_.broadcast(buffer_.narrow(0, 0, count), static_cast<int>(rank));
      unpack_of(rank, from, count, bytes);
    }
  }
}

}  // namespace titanium

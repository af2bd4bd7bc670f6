// Whole weights out of what the ranks of a copy own.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <vector>

#include "titanium/dist/group.h"
#include "titanium/formats/dtype.h"
#include "titanium/shard/param_store.h"
#include "titanium/weights/crew.h"

namespace titanium {

class Gatherer {
 public:
  // `ranks` are those of store.mesh().copy(), as a group of the thread that calls run().  Beside the targets
  // no more than about `memory` bytes are used.  The store outlives it.
  Gatherer(const ParamStore& store, Group ranks, uint64_t memory);

  struct Target {
    const Weight* weight;
    Dtype dtype;    // each owner converts its part to it before it is sent
    std::byte* to;  // [numel], row-major; on the CPU
  };
  // Fills the targets, the same ones on every rank, bitwise the same on all.  Where the ranks own about as
  // much of them each, all parts travel at once; else one rank after the other sends its own, so that nothing
  // is padded.
  void run(const std::vector<Target>& targets, Crew& crew);

 private:
  // A rank's slice of a target, at this byte of the rank's row of parts.
  struct Part {
    size_t target;
    Slice slice;
    int64_t at, bytes;
  };
  struct Row {
    std::vector<Part> parts;
    int64_t bytes = 0;
  };
  // The parts of `row` that lie in bytes [from, from + count), as slices: visit(target, slice, byte from
  // `from`).
  static void each_in(const Row& row, const std::vector<Target>& targets, int64_t from, int64_t count,
                      const std::function<void(const Target&, const Slice&, int64_t)>& visit);
  std::vector<Row> rows_of(const std::vector<Target>& targets) const;
  std::byte* buffer(int64_t bytes);

  Group ranks_;
  int64_t memory_;
  std::vector<std::map<const Weight*, Slice>> slices_;  // of each rank
  at::Tensor buffer_;
};

}  // namespace titanium

// A set of ranks that act together.  On a group of one every collective returns its input, so there is no
// second single-device path (design D10).
#pragma once
#include <ATen/core/Tensor.h>

namespace titanium {

class Group {
 public:
  Group() = default;  // a group of one: this rank alone
  int rank() const { return 0; }
  int size() const { return 1; }

  // shard [n] of every rank, in rank order -> flat [size n].  In place: shard is the rank's part of flat.
  void all_gather(const at::Tensor& flat) const;
  // Sums flat [size n] over ranks; the rank's own part of it then holds the sum, the rest is undefined.
  void reduce_scatter(const at::Tensor& flat) const;
  double sum(double value) const { return value; }
};

}  // namespace titanium

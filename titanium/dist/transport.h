// How the ranks of one group reach each other: what a backend implements (design D10).  Group is what others
// use.
#pragma once
#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "titanium/dist/group.h"

namespace titanium {

// One rank's end.  Calls block until this rank's part is done, come from one thread at a time, and follow the
// rules of Group.  Tensors are contiguous and not empty; groups have two ranks or more.  Each throws RankLost
// when a rank of the group ended or does not come within the world's timeout.
class Transport {
 public:
  virtual ~Transport() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual void all_gather(const at::Tensor& flat) = 0;      // see Group
  virtual void reduce_scatter(const at::Tensor& flat) = 0;  // the same
  virtual void all_reduce(const at::Tensor& flat, ReduceOp op) = 0;
  virtual void broadcast(const at::Tensor& flat, int root) = 0;
  virtual std::vector<std::string> exchange(const std::string& mine) = 0;
  virtual void barrier() = 0;
};

}  // namespace titanium

// A set of ranks that act together.  On a group of one every collective returns its input, so there is no
// second single-device path (design D10).
#pragma once
#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

namespace titanium {

class Transport;

enum class ReduceOp { kSum, kMax, kMin };

// A collective under way in the group's own thread.  wait() returns when its tensor may be used, or throws
// what the collective threw.  Destroying it waits too, and drops the error; but not while an exception
// unwinds.
class Pending {
 public:
  class Work;
  Pending() = default;  // nothing under way
  explicit Pending(std::shared_ptr<Work> work) : work_(std::move(work)) {}
  Pending(Pending&&) noexcept = default;
  Pending& operator=(Pending&& other) noexcept;
  ~Pending();
  void wait();  // once; later calls return at once

 private:
  std::shared_ptr<Work> work_;
};

// Tensors are contiguous, and the same length and dtype on every rank.  Every rank of the group calls the
// same collectives in the same order; a started one counts at its start.  Sums are taken in rank order, those
// of 16-bit dtypes in fp32, so that a result is bitwise the same on every rank and in every run.  RankLost
// names the rank that did not come, or that ended.
class Group {
 public:
  Group() = default;  // a group of one: this rank alone
  explicit Group(std::shared_ptr<Transport> transport);

  int rank() const { return rank_; }  // in the group
  int size() const { return size_; }

  // shard [n] of every rank, in rank order -> flat [size n].  In place: shard is the rank's part of flat.
  void all_gather(const at::Tensor& flat) const;
  // Sums flat [size n] over ranks; the rank's own part of it then holds the sum, the rest is undefined.
  void reduce_scatter(const at::Tensor& flat) const;
  void all_reduce(const at::Tensor& flat, ReduceOp op = ReduceOp::kSum) const;  // in place
  void broadcast(const at::Tensor& flat, int root) const;                       // in place
  void barrier() const;

  // The same while this rank goes on; the tensor must not be touched until the wait.
  Pending start_all_gather(const at::Tensor& flat) const;
  Pending start_reduce_scatter(const at::Tensor& flat) const;
  Pending start_broadcast(const at::Tensor& flat, int root) const;

  double sum(double value) const;
  // Bytes of any length from every rank, in rank order: counts, errors, names.
  std::vector<std::string> exchange(const std::string& mine) const;

 private:
  struct Shared;
  std::shared_ptr<Shared> shared_;  // null for a group of one
  int rank_ = 0, size_ = 1;
};

}  // namespace titanium

// What a stream of weights is applied to.  The receiver has checked order, names and checksums before it
// calls.
#pragma once
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "titanium/weights/receive.h"

namespace titanium {

class ReceiveTarget {
 public:
  virtual ~ReceiveTarget() = default;
  virtual std::string what() const = 0;                // for messages
  virtual std::vector<std::string> names() const = 0;  // of its tensors, sorted
  virtual const TensorSpec* find(const std::string& name) const = 0;
  virtual bool converts() const { return false; }  // takes another floating dtype than its own
  virtual std::optional<int64_t> version() const = 0;

  // Looks at the target afresh: names, find and version speak of it from now on.
  virtual void look() = 0;
  // A stream that holds these tensors of the target begins; each comes once, in any order.
  virtual void begin(const std::vector<std::string>& updated, int64_t version) = 0;
  virtual void apply(const TensorView& tensor) = 0;
  virtual void commit(int64_t version) = 0;
  virtual void drop() noexcept = 0;
};

std::unique_ptr<ReceiveTarget> folder_target(const std::filesystem::path& folder, bool fsync);

}  // namespace titanium

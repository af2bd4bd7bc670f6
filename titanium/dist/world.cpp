#include "titanium/dist/world.h"

#include <numeric>

#include "titanium/base/error.h"

namespace titanium {
namespace {

class SoloWorld final : public World {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  Group group(const std::vector<int>& ranks, const std::string&) override {
    if (ranks != std::vector<int>{0})
      throw Bug("a world of one is asked for a group of {} ranks", ranks.size());
    return {};
  }
  void progress(int64_t, std::string_view) override {}
  void fail(const std::string&) noexcept override {}
};

}  // namespace

Group World::all(const std::string& purpose) {
  std::vector<int> ranks(size());
  std::iota(ranks.begin(), ranks.end(), 0);
  return group(ranks, purpose);
}

std::shared_ptr<World> solo_world() {
  return std::make_shared<SoloWorld>();
}

}  // namespace titanium

#include "titanium/schedule/options.h"

#include <algorithm>
#include <array>

#include "titanium/base/error.h"

namespace titanium {

void validate(const PlanOptions& options) {
  const auto at_least = [](const char* option, int32_t value, int32_t least) {
    if (value < least) throw BadConfig("plan option {}: {} given, at least {} allowed", option, value, least);
  };
  at_least("recompute_every", options.recompute_every, 1);
  at_least("prefetch", options.prefetch, 0);
  at_least("pending_reduces", options.pending_reduces, 0);
  at_least("pending_sends", options.pending_sends, 0);
  at_least("offload_every", options.offload_every, 0);
  constexpr std::array<const char*, 4> kPasses = {"recompute", "offload", "unshard", "reduce"};
  for (const std::string& pass : options.disabled_passes) {
    if (std::find(kPasses.begin(), kPasses.end(), pass) == kPasses.end()) {
      throw BadConfig(
          "plan option disabled_passes: '{}' given, allowed are recompute, offload, unshard, reduce", pass);
    }
  }
}

}  // namespace titanium

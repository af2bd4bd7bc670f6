// One error for all ranks (design D11): what can fail on one rank alone, and comes before a collective, is
// done in agree().
#pragma once
#include <functional>
#include <optional>
#include <utility>

#include "titanium/dist/group.h"

namespace titanium {

// Runs `work` on every rank of the group and returns when all have.  Where it threw an Error on any rank, all
// ranks throw that of the lowest such rank: the same kind, the message led by "rank N: " in a group of
// several.  Other exceptions count as Bug.
void agree(const Group& group, const std::function<void()>& work);

// The same for work that gives a value.
template <typename Work>
auto agreed(const Group& group, Work work) {
  std::optional<decltype(work())> value;
  agree(group, [&] { value.emplace(work()); });
  return std::move(*value);
}

// BadConfig, on all ranks, when `text` is not the same everywhere; `what` names it ("the config", "the data
// files").
void agree_on(const Group& group, const std::string& what, const std::string& text);

}  // namespace titanium

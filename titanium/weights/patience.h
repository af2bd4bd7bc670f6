// agree() for work that takes longer than a collective may: files that one rank writes while others wait.
#pragma once
#include <atomic>
#include <functional>

#include "titanium/dist/group.h"

namespace titanium {

// As agree(group, work), whatever the world's timeout is: the work runs in a thread of its own, and once a
// second this one tells the others that it is still there.  `lost` turns true when another rank is lost: then
// the work should end, and RankLost is thrown.
void agree_patiently(const Group& group, const std::function<void(const std::atomic<bool>& lost)>& work);

}  // namespace titanium

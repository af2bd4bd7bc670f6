#include "titanium/dist/agree.h"

#include <algorithm>
#include <exception>

#include "titanium/base/error.h"

namespace titanium {
void agree(const Group& group, const std::function<void()>& work) {
  if (group.size() == 1) return work();
  std::string mine;  // empty: all is well; else the kind and the message
  try {
    work();
  } catch (const Error& e) {
    if (e.kind() == ErrorKind::kRankLost) throw;  // the others learn it from the transport
    mine = static_cast<char>('0' + static_cast<int>(e.kind())) + std::string(e.what());
  } catch (const std::exception& e) {
    mine = static_cast<char>('0' + static_cast<int>(ErrorKind::kBug)) + std::string(e.what());
  }
  const std::vector<std::string> all = group.exchange(mine);
  const auto bad = std::find_if(all.begin(), all.end(), [](const std::string& one) { return !one.empty(); });
  if (bad == all.end()) return;
  const std::string reason = bad->substr(1);
  throw_error(static_cast<ErrorKind>(bad->front() - '0'),
              all.size() == 1 ? reason  // of a planned world: no rank of it is there
                              : fmt::format("rank {}: {}", bad - all.begin(), reason));
}

void agree_on(const Group& group, const std::string& what, const std::string& text) {
  const std::vector<std::string> all = group.exchange(text);
  for (size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank] == all[0]) continue;
    size_t at = 0;
    while (at < std::min(all[rank].size(), all[0].size()) && all[rank][at] == all[0][at]) ++at;
    const size_t line = at == 0 ? 0 : all[0].rfind('\n', at - 1) + 1;  // npos + 1 = 0
    constexpr size_t kBefore = 60, kMost = 200;  // characters that are shown: before the difference, in all
    const size_t begin = at - line > kBefore ? at - kBefore : line;
    const auto excerpt = [&](const std::string& text) -> std::string {
      if (begin >= text.size()) return "";
      return (begin > line ? "..." : "") +
             text.substr(begin, std::min<size_t>(text.find('\n', begin) - begin, kMost));
    };
    throw BadConfig("{} of rank {} is not that of rank 0: '{}' against '{}'", what, rank, excerpt(all[rank]),
                    excerpt(all[0]));
  }
}

}  // namespace titanium

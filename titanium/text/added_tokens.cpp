#include "titanium/text/added_tokens.h"

#include <algorithm>

namespace titanium {

uint32_t AddedTokenMatcher::child(uint32_t node, uint8_t byte) const {
  for (const auto& [key, to] : nodes_[node].next)
    if (key == byte) return to;
  return 0;
}

void AddedTokenMatcher::add(const AddedToken& token, std::string_view content) {
  if (content.empty()) return;
  uint32_t node = 0;
  for (const char c : content) {
    const auto byte = static_cast<uint8_t>(c);
    uint32_t next = child(node, byte);
    if (next == 0) {
      next = static_cast<uint32_t>(nodes_.size());
      nodes_.emplace_back();
      nodes_[node].next.emplace_back(byte, next);
    }
    node = next;
  }
  if (nodes_[node].token >= 0) return;  // the first of equals holds
  nodes_[node].token = static_cast<int32_t>(tokens_.size());
  first_[static_cast<uint8_t>(content[0])] = true;
  tokens_.push_back(token);
}

std::vector<AddedTokenMatcher::Piece> AddedTokenMatcher::split(std::string_view text,
                                                               const unicode::Properties& properties) const {
  std::vector<Piece> pieces;
  size_t done = 0;
  auto has = [&](size_t i, unicode::Property property) {
    return (properties.of(unicode::at(text, i).code) & property) != 0;
  };
  for (size_t i = tokens_.empty() ? text.size() : 0; i < text.size();) {
    if (!first_[static_cast<uint8_t>(text[i])]) {
      ++i;
      continue;
    }
    const AddedToken* found = nullptr;
    size_t stop = i;
    uint32_t node = 0;
    for (size_t j = i; j < text.size(); ++j) {
      node = child(node, static_cast<uint8_t>(text[j]));
      if (node == 0) break;
      if (nodes_[node].token >= 0) {
        found = &tokens_[static_cast<size_t>(nodes_[node].token)];
        stop = j + 1;
      }
    }
    if (!found) {
      ++i;
      continue;
    }
    size_t begin = i, end = stop;
    i = stop;
    if (found->single_word && ((begin > 0 && has(unicode::before(text, begin), unicode::kWord)) ||
                               (end < text.size() && has(end, unicode::kWord))))
      continue;
    if (found->lstrip)
      while (begin > done && has(unicode::before(text, begin), unicode::kSpace))
        begin = unicode::before(text, begin);
    if (found->rstrip)
      while (end < text.size() && has(end, unicode::kSpace)) end += unicode::at(text, end).size;
    begin = std::max(begin, done);  // spaces that the token before has taken
    if (begin > done) pieces.push_back({-1, done, begin});
    pieces.push_back({found->id, begin, end});
    done = std::max(done, end);
  }
  if (done < text.size()) pieces.push_back({-1, done, text.size()});
  return pieces;
}

}  // namespace titanium

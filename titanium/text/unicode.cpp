#include "titanium/text/unicode.h"

#include <algorithm>
#include <array>
#include <map>

namespace titanium::unicode {
namespace {

struct Run {
  uint32_t first;
  uint8_t flags;
};
constexpr Run kRuns[] = {
#include "titanium/text/unicode_table.inc"
};

// Looks at one character at `p`.  Returns its size if it is whole and valid; else 0 with `bad` the size of
// the maximal bad piece and `open` whether the bytes end inside a piece that could go on.
int check_char(const uint8_t* p, const uint8_t* end, int* bad, bool* open) {
  *bad = 1;
  *open = false;
  const uint8_t lead = p[0];
  if (lead < 0x80) return 1;
  int size = 0;
  uint8_t low = 0x80, high = 0xbf;  // range of the second byte
  if (lead >= 0xc2 && lead <= 0xdf) {
    size = 2;
  } else if (lead >= 0xe0 && lead <= 0xef) {
    size = 3;
    if (lead == 0xe0) low = 0xa0;
    if (lead == 0xed) high = 0x9f;  // surrogates
  } else if (lead >= 0xf0 && lead <= 0xf4) {
    size = 4;
    if (lead == 0xf0) low = 0x90;
    if (lead == 0xf4) high = 0x8f;
  } else {
    return 0;
  }
  for (int i = 1; i < size; ++i) {
    if (p + i == end) {
      *bad = i;
      *open = true;
      return 0;
    }
    if (p[i] < (i == 1 ? low : 0x80) || p[i] > (i == 1 ? high : 0xbf)) {
      *bad = i;
      return 0;
    }
  }
  return size;
}

}  // namespace

uint8_t properties_of(uint32_t code) {
  const Run* after = std::upper_bound(std::begin(kRuns), std::end(kRuns), code,
                                      [](uint32_t c, const Run& run) { return c < run.first; });
  return (after - 1)->flags;
}

Properties::Properties() : index_(0x1100) {
  std::map<std::array<uint8_t, 256>, uint16_t> known;
  std::array<int, 256> uniform;  // the page that is all of one value, or -1
  uniform.fill(-1);
  auto add = [&](const std::array<uint8_t, 256>& values) {
    const auto [it, fresh] = known.try_emplace(values, static_cast<uint16_t>(known.size()));
    if (fresh) pages_.insert(pages_.end(), values.begin(), values.end());
    return it->second;
  };
  size_t run = 0;
  for (uint32_t page = 0; page < 0x1100; ++page) {
    const uint32_t begin = page << 8, end = begin + 256;
    auto next = [&] { return run + 1 < std::size(kRuns) ? kRuns[run + 1].first : 0x110000; };
    while (next() <= begin) ++run;
    std::array<uint8_t, 256> values;
    const uint8_t first = kRuns[run].flags;
    if (next() >= end) {
      if (uniform[first] < 0) {
        values.fill(first);
        uniform[first] = add(values);
      }
      index_[page] = static_cast<uint16_t>(uniform[first]);
      continue;
    }
    for (uint32_t c = begin; c < end; ++c) {
      while (next() <= c) ++run;
      values[c - begin] = kRuns[run].flags;
    }
    index_[page] = add(values);
  }
}

size_t find_bad_utf8(std::string_view text) {
  const auto* begin = reinterpret_cast<const uint8_t*>(text.data());
  const auto *end = begin + text.size(), *p = begin;
  while (p != end) {
    if (*p < 0x80) {
      ++p;
      continue;
    }
    int bad;
    bool open;
    const int size = check_char(p, end, &bad, &open);
    if (size == 0) return static_cast<size_t>(p - begin);
    p += size;
  }
  return std::string_view::npos;
}

void append(std::string& out, uint32_t c) {
  if (c < 0x80) {
    out += static_cast<char>(c);
  } else if (c < 0x800) {
    out += static_cast<char>(0xc0 | c >> 6);
    out += static_cast<char>(0x80 | (c & 0x3f));
  } else if (c < 0x10000) {
    out += static_cast<char>(0xe0 | c >> 12);
    out += static_cast<char>(0x80 | (c >> 6 & 0x3f));
    out += static_cast<char>(0x80 | (c & 0x3f));
  } else {
    out += static_cast<char>(0xf0 | c >> 18);
    out += static_cast<char>(0x80 | (c >> 12 & 0x3f));
    out += static_cast<char>(0x80 | (c >> 6 & 0x3f));
    out += static_cast<char>(0x80 | (c & 0x3f));
  }
}

void append_repaired(std::string& out, std::string_view bytes, std::string* tail) {
  const auto* p = reinterpret_cast<const uint8_t*>(bytes.data());
  const auto* end = p + bytes.size();
  while (p != end) {
    int bad;
    bool open;
    const int size = check_char(p, end, &bad, &open);
    if (size > 0) {
      out.append(reinterpret_cast<const char*>(p), static_cast<size_t>(size));
      p += size;
    } else if (open && tail) {
      tail->assign(reinterpret_cast<const char*>(p), static_cast<size_t>(end - p));
      return;
    } else {
      out += "\xef\xbf\xbd";
      p += bad;
    }
  }
}

}  // namespace titanium::unicode

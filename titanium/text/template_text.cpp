#include "titanium/text/template_text.h"

#include <utf8proc.h>

#include <algorithm>

#include "titanium/text/template_value.h"
#include "titanium/text/unicode.h"

namespace titanium::jinja {
namespace {

uint32_t to_upper(uint32_t c) {
  return static_cast<uint32_t>(utf8proc_toupper(static_cast<utf8proc_int32_t>(c)));
}
uint32_t to_lower(uint32_t c) {
  return static_cast<uint32_t>(utf8proc_tolower(static_cast<utf8proc_int32_t>(c)));
}
bool cased(uint32_t c) {
  return to_upper(c) != c || to_lower(c) != c;
}

template <typename F>
void each_char(std::string_view text, F&& use) {
  for (size_t i = 0; i < text.size();) {
    const auto [code, size] = unicode::at(text, i);
    use(code);
    i += size;
  }
}

void append_upper(std::string& out, uint32_t c) {
  if (c == 0xdf)
    out += "SS";
  else
    unicode::append(out, to_upper(c));
}

}  // namespace

std::string upper(std::string_view text) {
  std::string out;
  each_char(text, [&](uint32_t c) { append_upper(out, c); });
  return out;
}

std::string lower(std::string_view text) {
  std::string out;
  each_char(text, [&](uint32_t c) { unicode::append(out, to_lower(c)); });
  return out;
}

std::string capitalize(std::string_view text) {
  std::string out;
  bool first = true;
  each_char(text, [&](uint32_t c) {
    unicode::append(
        out, first ? static_cast<uint32_t>(utf8proc_totitle(static_cast<utf8proc_int32_t>(c))) : to_lower(c));
    first = false;
  });
  return out;
}

std::string title(std::string_view text) {
  std::string out;
  bool inside = false;
  each_char(text, [&](uint32_t c) {
    unicode::append(out, inside ? to_lower(c)
                                : static_cast<uint32_t>(utf8proc_totitle(static_cast<utf8proc_int32_t>(c))));
    inside = cased(c);
  });
  return out;
}

bool is_upper(std::string_view text) {
  bool any = false, all = true;
  each_char(text, [&](uint32_t c) {
    any |= cased(c);
    all &= to_upper(c) == c;
  });
  return any && all;
}

bool is_lower(std::string_view text) {
  bool any = false, all = true;
  each_char(text, [&](uint32_t c) {
    any |= cased(c);
    all &= to_lower(c) == c;
  });
  return any && all;
}

bool all_have(std::string_view text, uint8_t property) {
  bool all = !text.empty();
  each_char(text, [&](uint32_t c) { all &= (unicode::properties_of(c) & property) != 0; });
  return all;
}

std::string_view strip(std::string_view text, const std::string* characters, Side side) {
  std::vector<uint32_t> set;
  if (characters) each_char(*characters, [&](uint32_t c) { set.push_back(c); });
  auto goes = [&](uint32_t c) {
    return characters ? std::find(set.begin(), set.end(), c) != set.end() : is_python_space(c);
  };
  if (side != Side::kRight)
    while (!text.empty()) {
      const auto [code, size] = unicode::at(text, 0);
      if (!goes(code)) break;
      text.remove_prefix(size);
    }
  if (side != Side::kLeft)
    while (!text.empty()) {
      const size_t last = unicode::before(text, text.size());
      if (!goes(unicode::at(text, last).code)) break;
      text.remove_suffix(text.size() - last);
    }
  return text;
}

std::vector<std::string_view> split(std::string_view text, const std::string* separator, int64_t limit,
                                    bool from_right) {
  std::vector<std::string_view> out;
  auto more = [&] { return limit < 0 || static_cast<int64_t>(out.size()) < limit; };
  auto space_at = [&](size_t i) { return is_python_space(unicode::at(text, i).code); };
  if (separator && !from_right) {
    size_t begin = 0;
    for (size_t at = text.find(*separator); at != std::string_view::npos && more();
         at = text.find(*separator, begin)) {
      out.push_back(text.substr(begin, at - begin));
      begin = at + separator->size();
    }
    out.push_back(text.substr(begin));
  } else if (separator) {
    while (more()) {
      const size_t at = text.rfind(*separator);
      if (at == std::string_view::npos) break;
      out.push_back(text.substr(at + separator->size()));
      text = text.substr(0, at);
    }
    out.push_back(text);
    std::reverse(out.begin(), out.end());
  } else if (!from_right) {
    for (text = strip(text, nullptr, Side::kLeft); !text.empty(); text = strip(text, nullptr, Side::kLeft)) {
      size_t end = 0;
      if (more())
        while (end < text.size() && !space_at(end)) end += unicode::at(text, end).size;
      else
        end = text.size();
      out.push_back(text.substr(0, end));
      text.remove_prefix(end);
    }
  } else {
    for (text = strip(text, nullptr, Side::kRight); !text.empty();
         text = strip(text, nullptr, Side::kRight)) {
      size_t begin = text.size();
      if (more())
        while (begin > 0 && !space_at(unicode::before(text, begin))) begin = unicode::before(text, begin);
      else
        begin = 0;
      out.push_back(text.substr(begin));
      text = text.substr(0, begin);
    }
    std::reverse(out.begin(), out.end());
  }
  return out;
}

std::vector<std::string_view> split_lines(std::string_view text, bool keep_ends) {
  std::vector<std::string_view> out;
  size_t begin = 0;
  for (size_t i = 0; i < text.size();) {
    const auto [code, size] = unicode::at(text, i);
    size_t end = i + size;
    const bool ends = (code >= 0xa && code <= 0xd) || (code >= 0x1c && code <= 0x1e) || code == 0x85 ||
                      code == 0x2028 || code == 0x2029;
    if (code == '\r' && end < text.size() && text[end] == '\n') ++end;
    if (ends) {
      out.push_back(text.substr(begin, (keep_ends ? end : i) - begin));
      begin = end;
    }
    i = end;
  }
  if (begin < text.size()) out.push_back(text.substr(begin));
  return out;
}

std::string replace(std::string_view text, std::string_view what, std::string_view by, int64_t limit) {
  std::string out;
  size_t i = 0;
  for (int64_t n = 0; limit < 0 || n < limit; ++n) {
    if (what.empty()) {  // before every character and at the end
      out += by;
      if (i >= text.size()) return out;
      const size_t size = unicode::at(text, i).size;
      out += text.substr(i, size);
      i += size;
    } else {
      const size_t at = text.find(what, i);
      if (at == std::string_view::npos) break;
      out += text.substr(i, at - i);
      out += by;
      i = at + what.size();
    }
  }
  return out += text.substr(i);
}

}  // namespace titanium::jinja

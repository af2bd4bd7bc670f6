#include "titanium/text/regex.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <array>
#include <cstring>

#include "titanium/base/error.h"

namespace titanium {
namespace {

constexpr size_t kLongestPattern = 16384;
constexpr uint32_t kMatchLimit = 50'000'000;  // inner steps of one match
constexpr uint32_t kHeapLimitKib = 256 * 1024;
constexpr size_t kJitStackStart = 32 << 10, kJitStack = 8 << 20;

bool is_hex(char c) {
  return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F');
}

std::string pcre_message(int code) {
  std::array<PCRE2_UCHAR, 256> text{};
  pcre2_get_error_message(code, text.data(), text.size());
  return reinterpret_cast<const char*>(text.data());
}

}  // namespace

std::string oniguruma_to_pcre(std::string_view p, const std::string& where) {
  auto refuse = [&](std::string_view what) {
    throw BadConfig("{}: the pattern '{}' uses {}, which is not supported", where, p, what);
  };
  // \s of Oniguruma is White_Space; PCRE2 adds U+180E.
  constexpr std::string_view kSpaceItems = "\\t-\\r\\x{85}\\p{Z}";
  std::string out;
  bool in_class = false;
  for (size_t i = 0; i < p.size(); ++i) {
    const char c = p[i];
    if (c == '\\') {
      if (++i == p.size()) refuse("a backslash at its end");
      const char e = p[i];
      if (e == 's') {
        out += in_class ? std::string(kSpaceItems) : "[" + std::string(kSpaceItems) + "]";
      } else if (e == 'S') {
        if (in_class) refuse("\\S inside a class");
        out += "[^" + std::string(kSpaceItems) + "]";
      } else if (e == 'p' || e == 'P') {
        const size_t close = p.find('}', i);
        if (i + 1 >= p.size() || p[i + 1] != '{' || close == std::string_view::npos)
          refuse("\\p without {name}");
        out += '\\';
        out += p.substr(i, close - i + 1);
        i = close;
      } else if (e == 'u' || e == 'x') {
        size_t digits = 0;
        std::string_view hex;
        if (e == 'x' && i + 1 < p.size() && p[i + 1] == '{') {
          const size_t close = p.find('}', i);
          if (close == std::string_view::npos) refuse("\\x{ without }");
          hex = p.substr(i + 2, close - i - 2);
          i = close;
        } else {
          while (digits < (e == 'u' ? 4 : 2) && i + 1 + digits < p.size() && is_hex(p[i + 1 + digits]))
            ++digits;
          hex = p.substr(i + 1, digits);
          i += digits;
          if ((e == 'u' && digits != 4) || (e == 'x' && (digits == 0 || (digits == 2 && hex[0] >= '8'))))
            refuse("an escape for a byte, or an incomplete one");
        }
        for (const char h : hex)
          if (!is_hex(h)) refuse("an escape that is not hexadecimal");
        out += "\\x{" + std::string(hex) + "}";
      } else if (e == 'v') {
        out += "\\x{b}";
      } else if ((std::strchr("dDrntf", e) && e != 0) ||
                 (static_cast<unsigned char>(e) < 0x80 && std::ispunct(static_cast<unsigned char>(e)))) {
        out += '\\';
        out += e;
      } else {
        refuse(std::string("\\") + e);
      }
      continue;
    }
    if (in_class) {
      if (c == '[' && i + 1 < p.size() && p[i + 1] == ':') refuse("a [:class:]");
      if (c == '[') refuse("a class inside a class");
      if (c == '&' && i + 1 < p.size() && p[i + 1] == '&') refuse("class intersection &&");
      if (c == ']') in_class = false;
      out += c;
      continue;
    }
    if (c == '[') {
      in_class = true;
      out += c;
      if (i + 1 < p.size() && p[i + 1] == '^') out += p[++i];
      if (i + 1 < p.size() && p[i + 1] == ']') refuse("] first in a class");
      continue;
    }
    if (c == '^' || c == '$') refuse(std::string("the anchor ") + c);
    if (c == '#') out += '\\';  // only special in extended mode, where it would be a comment
    if (c == '}' && i + 1 < p.size() && p[i + 1] == '+') refuse("{n,m}+");
    if (c == '(' && i + 1 < p.size() && (p[i + 1] == '?' || p[i + 1] == '*')) {
      bool known = false;
      for (const std::string_view open : {"(?:", "(?i:", "(?=", "(?!", "(?<=", "(?<!", "(?>", "(?i)"}) {
        if (p.substr(i, open.size()) != open || (open == "(?i)" && i != 0)) continue;
        out += open;
        i += open.size() - 1;
        known = true;
        break;
      }
      if (!known) refuse(p.substr(i, 4));
      continue;
    }
    out += c;
  }
  return out;
}

struct Regex::Code {
  pcre2_code* code = nullptr;
  bool jit = false;
  Code() = default;
  Code(const Code&) = delete;
  Code& operator=(const Code&) = delete;
  ~Code() { pcre2_code_free(code); }
};

Regex::Regex(std::string_view pattern, const std::string& where) : where_(where) {
  if (pattern.size() > kLongestPattern)
    throw BadConfig("{}: a pattern of {} bytes; at most {}", where, pattern.size(), kLongestPattern);
  const std::string translated = oniguruma_to_pcre(pattern, where);
  auto code = std::make_shared<Code>();
  int error = 0;
  PCRE2_SIZE offset = 0;
  code->code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(translated.data()), translated.size(),
                             PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C, &error, &offset, nullptr);
  if (!code->code)
    throw BadConfig("{}: the pattern '{}' does not compile: {}", where, pattern, pcre_message(error));
  code->jit = pcre2_jit_compile(code->code, PCRE2_JIT_COMPLETE) == 0;
  code_ = std::move(code);
}

bool Regex::can_match_empty() const {
  uint32_t empty = 0;
  pcre2_pattern_info(code_->code, PCRE2_INFO_MATCHEMPTY, &empty);
  return empty != 0;
}

struct Regex::Matcher::State {
  pcre2_match_data* data = nullptr;
  pcre2_match_context* context = nullptr;
  pcre2_jit_stack* stack = nullptr;
  ~State() {
    pcre2_match_data_free(data);
    pcre2_match_context_free(context);
    pcre2_jit_stack_free(stack);
  }
};

Regex::Matcher::Matcher(const Regex& regex) : regex_(regex), state_(std::make_unique<State>()) {
  state_->data = pcre2_match_data_create_from_pattern(regex.code_->code, nullptr);
  state_->context = pcre2_match_context_create(nullptr);
  if (!state_->data || !state_->context) throw std::bad_alloc();
  pcre2_set_match_limit(state_->context, kMatchLimit);
  pcre2_set_heap_limit(state_->context, kHeapLimitKib);
  if (regex.code_->jit) {
    state_->stack = pcre2_jit_stack_create(kJitStackStart, kJitStack, nullptr);
    if (state_->stack) pcre2_jit_stack_assign(state_->context, nullptr, state_->stack);
  }
}

Regex::Matcher::~Matcher() = default;

bool Regex::Matcher::find(std::string_view text, size_t from, size_t* begin, size_t* end) {
  auto match = [&](uint32_t options) {
    return pcre2_match(regex_.code_->code, reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), from,
                       PCRE2_NO_UTF_CHECK | options, state_->data, state_->context);
  };
  int result = match(0);
  if (result == PCRE2_ERROR_JIT_STACKLIMIT) result = match(PCRE2_NO_JIT);
  if (result == PCRE2_ERROR_NOMATCH) return false;
  if (result < 0)
    throw BadData("{}: the pattern fails on a text of {} bytes: {}", regex_.where_, text.size(),
                  pcre_message(result));
  const PCRE2_SIZE* bounds = pcre2_get_ovector_pointer(state_->data);
  *begin = bounds[0];
  *end = bounds[1];
  return true;
}

}  // namespace titanium

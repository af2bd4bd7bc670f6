#include "titanium/text/pretokenize.h"

#include <algorithm>

#include "titanium/base/error.h"

namespace titanium {

const char* const kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
const char* const kQwen2Pattern =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
const char* const kLlama3Pattern =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

namespace {

using unicode::kDigits;
using unicode::kLetter;
using unicode::kNumber;
using unicode::kSpace;

constexpr uint8_t kClasses = kLetter | kNumber | kSpace;

// Reads characters of one piece with their properties.
class Scanner {
 public:
  Scanner(std::string_view text, size_t end, const unicode::Properties& properties)
      : text_(text), end_(end), properties_(properties) {}

  size_t end() const { return end_; }
  char byte(size_t i) const { return text_[i]; }
  bool is(size_t i, char c) const { return i < end_ && text_[i] == c; }

  // Properties of the character at i < end, and its size.
  uint8_t at(size_t i, size_t* size) const {
    const auto c = static_cast<uint8_t>(text_[i]);
    if (c < 0x80) {
      *size = 1;
      return properties_.of_ascii(c);
    }
    const auto character = unicode::at(text_, i);
    *size = character.size;
    return properties_.of(character.code);
  }
  // End of the run from `i` of characters whose class is `wanted` (0: neither letter, number nor space).
  size_t run(size_t i, uint8_t wanted) const {
    size_t size;
    while (i < end_ && (at(i, &size) & kClasses) == wanted) i += size;
    return i;
  }
  size_t newlines(size_t i) const {
    while (i < end_ && (text_[i] == '\r' || text_[i] == '\n')) ++i;
    return i;
  }

  // End of 's 't 're 've 'm 'll 'd at `i`, where an apostrophe stands; `i` if there is none.
  size_t contraction(size_t i, bool any_case) const {
    auto letter = [&](size_t at) -> char {
      if (at >= end_) return 0;
      const char c = text_[at];
      return any_case && c >= 'A' && c <= 'Z' ? static_cast<char>(c | 0x20) : c;
    };
    const char first = letter(i + 1), second = letter(i + 2);
    if (first == 's' || first == 't' || first == 'm' || first == 'd') return i + 2;
    if ((first == 'r' && second == 'e') || (first == 'v' && second == 'e') || (first == 'l' && second == 'l'))
      return i + 3;
    // U+017F, the long s, is an s when case does not count.
    if (any_case && i + 2 < end_ && text_[i + 1] == '\xc5' && text_[i + 2] == '\xbf') return i + 3;
    return i;
  }

  // The last three alternatives share this: \s+(?!\S)|\s+ from a space at `i`.
  size_t spaces(size_t i) const {
    const size_t stop = run(i, kSpace);
    if (stop == end_) return stop;
    const size_t last = unicode::before(text_, stop);
    return last > i ? last : stop;
  }

  size_t gpt2(size_t i) const {
    if (text_[i] == '\'') {
      const size_t stop = contraction(i, false);
      if (stop > i) return stop;
    }
    size_t size;
    uint8_t kind = at(i, &size) & kClasses;
    size_t from = i;
    if (text_[i] == ' ' && i + 1 < end_) {
      from = i + 1;
      kind = at(from, &size) & kClasses;
    }
    if (kind == kSpace) return spaces(i);
    return run(from + size, kind);
  }

  size_t llama3(size_t i, int digits) const {
    if (text_[i] == '\'') {
      const size_t stop = contraction(i, true);
      if (stop > i) return stop;
    }
    size_t size, next_size = 0;
    const uint8_t kind = at(i, &size) & kClasses;
    if (kind == kLetter) return run(i + size, kLetter);
    if (kind == kNumber) {
      size_t stop = i + size;
      for (int n = 1; n < digits && stop < end_; ++n) {
        if ((at(stop, &next_size) & kClasses) != kNumber) break;
        stop += next_size;
      }
      return stop;
    }
    const size_t next = i + size;
    const bool newline = text_[i] == '\r' || text_[i] == '\n';
    const uint8_t next_kind = next < end_ ? at(next, &next_size) & kClasses : static_cast<uint8_t>(kSpace);
    if (!newline && next_kind == kLetter) return run(next + next_size, kLetter);
    if (kind == 0) return newlines(run(next, 0));
    if (text_[i] == ' ' && next_kind == 0) return newlines(run(next + next_size, 0));
    const size_t stop = run(i, kSpace);
    for (size_t j = stop; j > i; --j)
      if (text_[j - 1] == '\r' || text_[j - 1] == '\n') return j;
    return spaces(i);
  }

 private:
  std::string_view text_;
  size_t end_;
  const unicode::Properties& properties_;
};

struct Part {
  size_t begin, end;
  bool match;
};

// Hugging Face's SplitDelimiterBehavior over alternating matches and gaps.
void emit_parts(const std::vector<Part>& parts, SplitBehavior behavior, PieceSink& sink) {
  std::vector<Part> merged;
  bool previous = false;
  auto emit = [&](const Part& part) {
    if (part.begin < part.end) sink.piece(part.begin, part.end);
  };
  switch (behavior) {
    case SplitBehavior::kIsolated:
      for (const Part& part : parts) emit(part);
      return;
    case SplitBehavior::kRemoved:
      for (const Part& part : parts)
        if (!part.match) emit(part);
      return;
    case SplitBehavior::kMergedWithPrevious:
      for (const Part& part : parts) {
        if (part.match && !previous && !merged.empty())
          merged.back().end = part.end;
        else
          merged.push_back(part);
        previous = part.match;
      }
      break;
    case SplitBehavior::kMergedWithNext:
      for (auto part = parts.rbegin(); part != parts.rend(); ++part) {
        if (part->match && !previous && !merged.empty())
          merged.back().begin = part->begin;
        else
          merged.push_back(*part);
        previous = part->match;
      }
      std::reverse(merged.begin(), merged.end());
      break;
    case SplitBehavior::kContiguous:
      for (const Part& part : parts) {
        if (part.match == previous && !merged.empty())
          merged.back().end = part.end;
        else
          merged.push_back(part);
        previous = part.match;
      }
      break;
  }
  for (const Part& part : merged) emit(part);
}

}  // namespace

SplitStep SplitStep::with_regex(const std::string& pattern, SplitBehavior behavior, bool invert,
                                const std::string& where) {
  SplitStep step;
  step.kind = Kind::kRegex;
  step.regex.emplace(pattern, where);
  if (step.regex->can_match_empty() &&
      (behavior == SplitBehavior::kMergedWithPrevious || behavior == SplitBehavior::kMergedWithNext))
    throw BadConfig(
        "{}: the pattern '{}' can match nothing, which is not supported with the behavior Merged...", where,
        pattern);
  step.behavior = behavior;
  step.invert = invert;
  return step;
}

SplitStep SplitStep::from_pattern(const std::string& pattern, SplitBehavior behavior, bool invert,
                                  const std::string& where) {
  // These patterns leave no gaps, so "keep the matches alone" has two spellings.
  if (behavior == SplitBehavior::kIsolated || (behavior == SplitBehavior::kRemoved && invert)) {
    SplitStep step;
    step.kind = Kind::kFast;
    for (const auto& [text, fast] :
         {std::pair(kGpt2Pattern, FastPattern::kGpt2), std::pair(kQwen2Pattern, FastPattern::kDigits1),
          std::pair(kLlama3Pattern, FastPattern::kDigits3)}) {
      step.fast = fast;
      if (pattern == text) return step;
    }
  }
  return with_regex(pattern, behavior, invert, where);
}

SplitStep SplitStep::digits(bool individual) {
  SplitStep step;
  step.kind = Kind::kDigits;
  step.behavior = individual ? SplitBehavior::kIsolated : SplitBehavior::kContiguous;
  return step;
}

PreTokenizer::PreTokenizer(const std::vector<SplitStep>& steps, const unicode::Properties& properties)
    : steps_(steps), properties_(properties), matchers_(steps.size()) {
  for (size_t i = 0; i < steps.size(); ++i)
    if (steps[i].kind == SplitStep::Kind::kRegex)
      matchers_[i] = std::make_unique<Regex::Matcher>(*steps[i].regex);
}

void PreTokenizer::run(std::string_view text, size_t begin, size_t end, PieceSink& sink) {
  if (begin < end) step(0, text, begin, end, sink);
}

void PreTokenizer::step(size_t index, std::string_view text, size_t begin, size_t end, PieceSink& sink) {
  if (index == steps_.size()) {
    sink.piece(begin, end);
    return;
  }
  struct Next final : PieceSink {
    PreTokenizer* self;
    size_t index;
    std::string_view text;
    PieceSink* sink;
    void piece(size_t begin, size_t end) override { self->step(index, text, begin, end, *sink); }
  } next;
  next.self = this;
  next.index = index + 1;
  next.text = text;
  next.sink = &sink;
  PieceSink& target = index + 1 == steps_.size() ? sink : static_cast<PieceSink&>(next);

  const SplitStep& what = steps_[index];
  const Scanner scan(text, end, properties_);
  switch (what.kind) {
    case SplitStep::Kind::kFast:
      for (size_t i = begin; i < end;) {
        const size_t stop = what.fast == FastPattern::kGpt2
                                ? scan.gpt2(i)
                                : scan.llama3(i, what.fast == FastPattern::kDigits3 ? 3 : 1);
        target.piece(i, stop);
        i = stop;
      }
      return;
    case SplitStep::Kind::kDigits: {
      size_t piece = begin, size;
      bool in_digits = false;
      for (size_t i = begin; i < end; i += size) {
        const bool digit = scan.at(i, &size) & kDigits;
        if (i > piece && (digit != in_digits || (digit && what.behavior == SplitBehavior::kIsolated))) {
          target.piece(piece, i);
          piece = i;
        }
        in_digits = digit;
      }
      target.piece(piece, end);
      return;
    }
    case SplitStep::Kind::kRegex: {
      const std::string_view piece = text.substr(begin, end - begin);
      std::vector<Part> parts;
      size_t done = 0, from = 0, match_begin, match_end;
      while (from <= piece.size() && matchers_[index]->find(piece, from, &match_begin, &match_end)) {
        if (match_begin > done) parts.push_back({begin + done, begin + match_begin, what.invert});
        parts.push_back({begin + match_begin, begin + match_end, !what.invert});
        done = match_end;
        from = match_end;
        if (match_begin == match_end)  // an empty match: go on after the next character
          from += from < piece.size() ? unicode::at(piece, from).size : 1;
      }
      if (done < piece.size()) parts.push_back({begin + done, end, what.invert});
      emit_parts(parts, what.behavior, target);
      return;
    }
  }
}

}  // namespace titanium

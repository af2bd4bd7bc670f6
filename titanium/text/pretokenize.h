// The pre_tokenizer of tokenizer.json: cuts a text into the pieces that BPE works on, one by one.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "titanium/text/regex.h"
#include "titanium/text/unicode.h"

namespace titanium {

enum class SplitBehavior { kRemoved, kIsolated, kMergedWithPrevious, kMergedWithNext, kContiguous };

// Patterns that are written out by hand, several times faster than PCRE2.
enum class FastPattern {
  kGpt2,     // ByteLevel's own: 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
  kDigits1,  // Qwen 2 and 3: (?i:'s|..)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|
             // ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|..
  kDigits3,  // Llama 3: the same with \p{N}{1,3}
};
extern const char* const kGpt2Pattern;
extern const char* const kQwen2Pattern;
extern const char* const kLlama3Pattern;

// Where pieces go.  Offsets are bytes of the text that was given.
class PieceSink {
 public:
  virtual void piece(size_t begin, size_t end) = 0;

 protected:
  ~PieceSink() = default;
};

// One step of a Sequence.
struct SplitStep {
  enum class Kind { kFast, kRegex, kDigits } kind = Kind::kFast;
  FastPattern fast = FastPattern::kGpt2;  // kFast; every character is part of some match
  std::optional<Regex> regex;             // kRegex
  SplitBehavior behavior = SplitBehavior::kIsolated;
  bool invert = false;

  // Takes the hand-written form where there is one and the behavior allows it.
  static SplitStep from_pattern(const std::string& pattern, SplitBehavior behavior, bool invert,
                                const std::string& where);
  static SplitStep with_regex(const std::string& pattern, SplitBehavior behavior, bool invert,
                              const std::string& where);
  static SplitStep digits(bool individual);
};

// Runs `steps` one inside the other over text[begin, end); each step sees only its piece, as in Hugging
// Face's. Make one per thread: it holds the regex state.
class PreTokenizer {
 public:
  PreTokenizer(const std::vector<SplitStep>& steps, const unicode::Properties& properties);
  void run(std::string_view text, size_t begin, size_t end, PieceSink& sink);

 private:
  void step(size_t index, std::string_view text, size_t begin, size_t end, PieceSink& sink);

  const std::vector<SplitStep>& steps_;
  const unicode::Properties& properties_;
  std::vector<std::unique_ptr<Regex::Matcher>> matchers_;  // [steps], null where not needed
};

}  // namespace titanium

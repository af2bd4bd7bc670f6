// PCRE2 for the patterns of tokenizer.json, which are written for Oniguruma (Ruby syntax).
#pragma once
#include <memory>
#include <string>
#include <string_view>

namespace titanium {

// A compiled pattern; const and shared by threads.  PCRE2's \p{..} are those of the installed library
// (Unicode 14 in 10.42), Hugging Face's those of Unicode 16: they differ in letters and digits that were
// added since.
class Regex {
 public:
  // BadConfig with `where` (the key) in front for a pattern that does not compile, or that uses syntax which
  // the two libraries read differently: \w \b \h ^ $ and the like, {n,m}+, class intersection, option letters
  // other than i.
  Regex(std::string_view pattern, const std::string& where);

  bool can_match_empty() const;

  // One search; keep one per thread and text.
  class Matcher {
   public:
    explicit Matcher(const Regex& regex);
    ~Matcher();
    Matcher(const Matcher&) = delete;
    Matcher& operator=(const Matcher&) = delete;
    // First match at or after `from`; false if none.  BadData if the pattern runs past its limits on this
    // text.
    bool find(std::string_view text, size_t from, size_t* begin, size_t* end);

   private:
    struct State;
    const Regex& regex_;
    std::unique_ptr<State> state_;
  };

 private:
  struct Code;
  std::string where_;
  std::shared_ptr<const Code> code_;
};

// The pattern as PCRE2 has to be given it.  Public for tests.
std::string oniguruma_to_pcre(std::string_view pattern, const std::string& where);

}  // namespace titanium

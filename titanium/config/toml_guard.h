#pragma once
#include <string>
#include <string_view>

namespace titanium {

// A TOML text in a form that toml++ 3.3 takes safely.
//
// It takes tables apart by recursion, and a dotted key makes a table a dot: so depth is bounded.  Its test
// for white space outside ASCII has undefined results: so bytes outside ASCII are written as a mark and two
// digits, a mark that the text does not hold, and restored in what comes out.
class GuardedToml {
 public:
  // BadConfig with source and line: not UTF-8, or too deep.
  GuardedToml(std::string_view text, const std::string& source);

  const std::string& text() const { return text_; }
  std::string restore(std::string_view parsed) const;

 private:
  std::string text_;
  std::string mark_;  // empty where the text is ASCII
};

}  // namespace titanium

#include "titanium/text/pretokenize.h"

#include <gtest/gtest.h>

#include "titanium/base/error.h"
#include "titanium/base/random.h"
#include "titanium/text/nfc.h"

namespace titanium {
namespace {

using Pieces = std::vector<std::pair<size_t, size_t>>;

const unicode::Properties& properties() {
  static const unicode::Properties table;
  return table;
}

Pieces split(const std::vector<SplitStep>& steps, std::string_view text) {
  struct Sink final : PieceSink {
    Pieces pieces;
    void piece(size_t begin, size_t end) override { pieces.emplace_back(begin, end); }
  } sink;
  PreTokenizer(steps, properties()).run(text, 0, text.size(), sink);
  return sink.pieces;
}

std::vector<SplitStep> one(SplitStep step) {
  std::vector<SplitStep> steps;
  steps.push_back(std::move(step));
  return steps;
}

// The class of a character in the table, and in the installed PCRE2, whose Unicode is older.
class Oracle {
 public:
  Oracle() : letter_("\\p{L}", "t"), number_("\\p{N}", "t"), space_("\\s", "t"), assigned_("\\P{Cn}", "t") {}
  bool knows(uint32_t c) const { return has(assigned_, c); }
  bool agrees(uint32_t c) const {
    const uint8_t have = properties().of(c);
    return has(letter_, c) == ((have & unicode::kLetter) != 0) &&
           has(number_, c) == ((have & unicode::kNumber) != 0) &&
           has(space_, c) == ((have & unicode::kSpace) != 0);
  }

 private:
  static bool has(const Regex& regex, uint32_t c) {
    std::string text;
    unicode::append(text, c);
    size_t begin, end;
    return Regex::Matcher(regex).find(text, 0, &begin, &end);
  }
  Regex letter_, number_, space_, assigned_;
};

TEST(PreTokenize, TableAgreesWithPcreOnWhatItKnows) {
  const Oracle oracle;
  int compared = 0;
  for (uint32_t c = 0; c < 0x20000; ++c) {
    if (c >= 0xd800 && c < 0xe000) continue;
    EXPECT_EQ(properties().of(c), unicode::properties_of(c));
    if (c >= 0x3400 && c < 0xd7b0 && c % 16 != 0) continue;  // ideographs and Hangul: a sample
    if (!oracle.knows(c)) continue;
    EXPECT_TRUE(oracle.agrees(c)) << std::hex << c;
    ++compared;
  }
  EXPECT_GT(compared, 30000);
}

// The hand-written patterns cut as PCRE2 does, on texts made to hit every alternative.
TEST(PreTokenize, FastPatternsEqualPcre) {
  const char* parts[] = {" ",      "  ",      "\n",     "\r",         "\t",         "\r\n",   "'",
                         "'s",     "'S",      "'re",    "'LL",        "'ve",        "'d",     "'m",
                         "'T",     "'\u017f", "a",      "Z",          "ab",         "\u00e9", "e\u0301",
                         "\u4f60", "1",       "23",     "\u00b2",     "\u2167",     "\u00bd", ".",
                         ",",      "!?",      "_",      "\u3000",     "\u00a0",     "\u0085", "\u2028",
                         "\u180e", "\u200b",  "\u0300", "\U0001f600", "\U0001d49c", "\u0e33", "<|x|>",
                         "/",      "\\",      "\x7f",   "\v"};
  struct Case {
    const char* pattern;
    const char* name;
  };
  const Oracle oracle;
  const Random random(7, Purpose::kTest);
  uint64_t draw = 0;
  for (const Case& pattern :
       {Case{kGpt2Pattern, "gpt2"}, Case{kQwen2Pattern, "qwen2"}, Case{kLlama3Pattern, "llama3"}}) {
    const auto fast = one(SplitStep::from_pattern(pattern.pattern, SplitBehavior::kIsolated, false, "t"));
    const auto slow = one(SplitStep::with_regex(pattern.pattern, SplitBehavior::kIsolated, false, "t"));
    ASSERT_EQ(fast[0].kind, SplitStep::Kind::kFast);
    ASSERT_EQ(slow[0].kind, SplitStep::Kind::kRegex);
    for (int round = 0; round < 20000; ++round) {
      std::string text;
      const uint64_t count = random.below(draw++, round % 10 == 0 ? 60 : 12);
      for (uint64_t i = 0; i < count; ++i) {
        if (random.below(draw++, 8) > 0) {
          text += parts[random.below(draw++, std::size(parts))];
          continue;
        }
        const auto c = static_cast<uint32_t>(random.below(draw++, 0x3000));
        if (oracle.knows(c)) unicode::append(text, c);
      }
      const Pieces expected = split(slow, text);
      ASSERT_EQ(split(fast, text), expected) << pattern.name << " [" << text << "]";
      size_t at = 0;
      for (const auto& [begin, end] : expected) {
        ASSERT_EQ(begin, at);
        at = end;
      }
      ASSERT_EQ(at, text.size());
    }
  }
}

TEST(PreTokenize, Behaviors) {
  const std::string text = "a--b-c";
  auto with = [&](SplitBehavior behavior, bool invert = false) {
    return split(one(SplitStep::with_regex("-", behavior, invert, "t")), text);
  };
  EXPECT_EQ(with(SplitBehavior::kIsolated), (Pieces{{0, 1}, {1, 2}, {2, 3}, {3, 4}, {4, 5}, {5, 6}}));
  EXPECT_EQ(with(SplitBehavior::kRemoved), (Pieces{{0, 1}, {3, 4}, {5, 6}}));
  EXPECT_EQ(with(SplitBehavior::kRemoved, true), (Pieces{{1, 2}, {2, 3}, {4, 5}}));
  EXPECT_EQ(with(SplitBehavior::kMergedWithPrevious), (Pieces{{0, 2}, {2, 3}, {3, 5}, {5, 6}}));
  EXPECT_EQ(with(SplitBehavior::kMergedWithNext), (Pieces{{0, 1}, {1, 2}, {2, 4}, {4, 6}}));
  EXPECT_EQ(with(SplitBehavior::kContiguous), (Pieces{{0, 1}, {1, 3}, {3, 4}, {4, 5}, {5, 6}}));
}

TEST(PreTokenize, StepsRunInsideOneAnother) {
  std::vector<SplitStep> steps;
  steps.push_back(SplitStep::digits(true));
  steps.push_back(SplitStep::from_pattern(kGpt2Pattern, SplitBehavior::kIsolated, false, "t"));
  EXPECT_EQ(split(steps, "a 12\u00b2"), (Pieces{{0, 1}, {1, 2}, {2, 3}, {3, 4}, {4, 6}}));
  steps[0] = SplitStep::digits(false);
  EXPECT_EQ(split(steps, "a 12\u00b2"), (Pieces{{0, 1}, {1, 2}, {2, 6}}));
}

TEST(PreTokenize, PatternsThatTheLibrariesReadDifferentlyAreRefused) {
  for (const char* pattern :
       {"\\w+",   "\\bx",   "^a",       "a$",  "\\h", "a{1,2}+",  "[a&&b]", "[[:alpha:]]",
        "(?m:a)", "a(?i)b", "(?P<n>a)", "\\K", "\\R", "\\xff",    "[\\S]",  "(*FAIL)",
        "\\pL",   "\\",     "[]a]",     "(",   "a**", "\\p{Nope}"}) {
    try {
      Regex(pattern, "t.json: pattern");
      ADD_FAILURE() << pattern;
    } catch (const BadConfig& error) {
      EXPECT_NE(std::string(error.what()).find("t.json: pattern: the pattern '" + std::string(pattern)),
                std::string::npos)
          << error.what();
    }
  }
  EXPECT_EQ(oniguruma_to_pcre("\\u4e00\\x41#", "t"), "\\x{4e00}\\x{41}\\#");
}

// A pattern that backtracks without end is stopped.
TEST(PreTokenize, RunawayPatternsEnd) {
  const auto steps = one(SplitStep::with_regex("(?:a+)+[bc]", SplitBehavior::kIsolated, false, "t"));
  EXPECT_THROW(split(steps, std::string(60, 'a')), BadData);
}

// Conformance cases: composition, reordering, Hangul, singletons, exclusions.
TEST(Nfc, KnownCases) {
  const std::pair<const char*, const char*> cases[] = {{"e\u0301", "\u00e9"},
                                                       {"\u212b", "\u00c5"},
                                                       {"\u1100\u1161\u11a8", "\uac01"},
                                                       {"\u0958", "\u0915\u093c"},
                                                       {"q\u0307\u0323", "q\u0323\u0307"},
                                                       {"s\u0323\u0307", "\u1e69"},
                                                       {"\u0344", "\u0308\u0301"}};
  for (const auto& [input, expected] : cases) {
    const std::string text = std::string("x ") + input + " y";
    const Normalized out = nfc(text, properties());
    ASSERT_TRUE(out.changed);
    EXPECT_EQ(out.text, std::string("x ") + expected + " y");
    ASSERT_EQ(out.spans.size(), out.text.size());
    EXPECT_LE(out.spans[2].begin, 2);  // before a mark the space is part of the stretch
    EXPECT_EQ(out.spans[2].end, static_cast<int64_t>(text.size()) - 2);
    EXPECT_EQ(out.spans.back(),
              (ByteSpan{static_cast<int64_t>(text.size()) - 1, static_cast<int64_t>(text.size())}));
  }
  for (const char* same : {"", "abc", "\u00e9", "\uac01", "q\u0323\u0307", "\u4f60"})
    EXPECT_FALSE(nfc(same, properties()).changed) << same;
}

}  // namespace
}  // namespace titanium

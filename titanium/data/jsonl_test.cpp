#include "titanium/data/jsonl.h"

#include <gtest/gtest.h>

#include "titanium/base/error.h"
#include "titanium/data/test_files.h"

namespace titanium {
namespace {

std::vector<std::string> lines(const JsonlFile& file) {
  std::vector<std::string> out;
  for (int64_t i = 0; i < file.size(); ++i) out.emplace_back(file.line(i));
  return out;
}

TEST(Jsonl, LineEndsBlankLinesAndAMissingLastNewline) {
  const auto file = JsonlFile::from_text("{\"a\":1}\r\n\n  \t\r\n{\"b\":2}\n\r\n{\"c\":3}", "x.jsonl");
  EXPECT_EQ(lines(file), (std::vector<std::string>{"{\"a\":1}", "{\"b\":2}", "{\"c\":3}"}));
  EXPECT_EQ(file.where(0), "x.jsonl:1");
  EXPECT_EQ(file.where(1), "x.jsonl:4");
  EXPECT_EQ(file.where(2), "x.jsonl:6");
  EXPECT_THROW(file.line(3), Bug);
  EXPECT_THROW(file.line(-1), Bug);
}

TEST(Jsonl, NothingOrBlanksOnlyHaveNoRecords) {
  for (const char* text : {"", "\n", "\r\n\r\n", "   ", "\xEF\xBB\xBF", "\xEF\xBB\xBF\n"}) {
    EXPECT_EQ(JsonlFile::from_text(text, "x").size(), 0) << text;
  }
}

TEST(Jsonl, AByteOrderMarkIsSkipped) {
  const auto file = JsonlFile::from_text("\xEF\xBB\xBF{}\n{}\n", "x");
  EXPECT_EQ(lines(file), (std::vector<std::string>{"{}", "{}"}));
  EXPECT_EQ(file.line_number(1), 2);
}

TEST(Jsonl, NumbersOfManyLines) {
  std::string text;
  std::vector<int64_t> numbers;
  int64_t number = 0;
  for (int64_t i = 0; i < 1000; ++i) {
    for (int64_t blanks = i % 3; blanks > 0; --blanks, ++number) text += "\n";
    text += std::to_string(i) + "\n";
    numbers.push_back(++number);
  }
  const auto file = JsonlFile::from_text(text, "x");
  ASSERT_EQ(file.size(), 1000);
  for (int64_t i = 0; i < 1000; ++i) {
    ASSERT_EQ(file.line(i), std::to_string(i));
    ASSERT_EQ(file.line_number(i), numbers[static_cast<size_t>(i)]);
  }
}

TEST(Jsonl, FilesOnDisk) {
  const TestFolder folder("jsonl");
  const auto path = folder.write("a.jsonl", "{}\n[]"), empty = folder.write("empty.jsonl", "");
  {
    const JsonlFile file(path);
    EXPECT_EQ(lines(file), (std::vector<std::string>{"{}", "[]"}));
    EXPECT_EQ(file.where(1), path + ":2");
    EXPECT_EQ(JsonlFile(empty).size(), 0);
    const JsonlFile copy = file;  // shares the mapping
    EXPECT_EQ(copy.line(1), "[]");
  }
  for (const std::string& bad : {folder.path("missing.jsonl"), folder.path("")}) {
    try {
      const JsonlFile file{bad};
      FAIL();
    } catch (const BadData& e) {
      EXPECT_NE(std::string(e.what()).find(bad), std::string::npos) << e.what();
    }
  }
}

}  // namespace
}  // namespace titanium

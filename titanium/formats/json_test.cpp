#include "titanium/formats/json.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <csignal>

#include "titanium/formats/test_util.h"

namespace titanium {
namespace {
using testing::error_of;
using testing::put;
using testing::TempFolder;

TEST(Json, ReadsAFile) {
  TempFolder folder;
  put(folder / "a.json", R"({"a": [1, 2.5, "x", null, true]})");
  const Json json = read_json(folder / "a.json");
  EXPECT_EQ(json["a"][1], 2.5);
}

TEST(Json, NamesFileAndPosition) {
  TempFolder folder;
  const struct {
    const char* text;
    const char* says;
  } cases[] = {
      {"{\n  \"a\": 1,\n  \"b\": }\n", "line 3, column 8"},
      {"", "line 1, column 1"},
      {"{} x", "line 1, column 4"},
      {"{\"a\": 1, \"b\": {\"a\": 2}, \"a\": 3}", "key 'a' is given twice"},
      {"[1, 2", "line 1, column 6"},
      {"\"\xff\"", "UTF-8"},
      {"{\"a\": NaN}", "line 1"},
  };
  for (const auto& c : cases) {
    put(folder / "bad.json", c.text);
    const auto error = error_of([&] { read_json(folder / "bad.json"); });
    EXPECT_SAYS(error, "BadConfig: " + (folder / "bad.json").string());
    EXPECT_SAYS(error, c.says);
  }
  const auto error = error_of([&] { read_json(folder / "none.json"); });
  EXPECT_SAYS(error, "none.json: cannot be opened: No such file");
  EXPECT_SAYS(error_of([&] { read_json(folder.path()); }), "is not a regular file");
  ASSERT_EQ(mkfifo((folder / "pipe").c_str(), 0600), 0);  // that nobody writes to
  EXPECT_SAYS(error_of([&] { read_json(folder / "pipe"); }), "pipe: is not a regular file");
}

TEST(Json, SameKeyInDifferentObjectsIsFine) {
  EXPECT_EQ(parse_json(R"([{"a":1},{"a":{"a":2}}])", "text")[1]["a"]["a"], 2);
}

TEST(Json, LimitsDepthAndSize) {
  const auto nested = [](int depth) { return std::string(depth, '[') + std::string(depth, ']'); };
  EXPECT_NO_THROW(parse_json(nested(200), "text"));
  EXPECT_SAYS(error_of([&] { parse_json(nested(201), "text"); }), "nested deeper than 200");
  EXPECT_SAYS(error_of([&] { parse_json(std::string(5'000'000, '['), "text"); }), "nested deeper than 200");
  EXPECT_SAYS(error_of([&] { parse_json("[1, 2, 3]", "text", {4, 10}); }), "9 bytes of JSON, allowed are 4");
  TempFolder folder;
  put(folder / "long.json", "[1, 2, 3]");
  EXPECT_SAYS(error_of([&] { read_json(folder / "long.json", {4, 10}); }), "is 9 bytes long, allowed are 4");
}

TEST(WriteFile, ReplacesTheWholeFileAndLeavesNothingElse) {
  TempFolder folder;
  write_file(folder / "a", "old and longer");
  write_file(folder / "a", "new");
  EXPECT_EQ(read_file(folder / "a"), "new");
  EXPECT_EQ(folder.files(), 1u);
  const auto error = error_of([&] { write_file(folder / "no" / "a", "x"); });
  EXPECT_SAYS(error, "BadCheckpoint: ");
  EXPECT_SAYS(error, "cannot be created: No such file or directory");
}

// A full disk, played by a limit on the size of files.
TEST(WriteFile, AFailedWriteKeepsTheOldFile) {
  TempFolder folder;
  write_file(folder / "a", "old");
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  rlimit tight{4096, before.rlim_max};
  setrlimit(RLIMIT_FSIZE, &tight);
  const auto error = error_of([&] { write_file(folder / "a", std::string(10000, 'x')); });
  setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  EXPECT_SAYS(error, "cannot be written: File too large");
  EXPECT_EQ(read_file(folder / "a"), "old");
  EXPECT_EQ(folder.files(), 1u);
}

}  // namespace
}  // namespace titanium

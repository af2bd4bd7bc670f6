// A JSONL file as an index of its lines.  The file is mapped; only the index is in memory.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace titanium {

class MappedFile;

// Lines end in \n or \r\n, the last one also at the end of the file.  Lines of blanks alone are not records.
// A UTF-8 byte order mark at the start is skipped.
class JsonlFile {
 public:
  explicit JsonlFile(const std::string& path);  // BadData: not there, not a regular file, not readable
  // Text in memory, which the caller keeps alive; `name` is what messages call it.
  static JsonlFile from_text(std::string_view text, const std::string& name);

  int64_t size() const { return static_cast<int64_t>(starts_.size()); }  // records
  size_t bytes() const { return text_.size(); }
  std::string_view line(int64_t record) const;  // without its line end
  int64_t line_number(int64_t record) const;    // from 1, blank lines counted
  std::string where(int64_t record) const;      // "path:line"
  const std::string& path() const { return path_; }

 private:
  JsonlFile() = default;
  void index();

  std::string path_;
  std::shared_ptr<const MappedFile> file_;
  std::string_view text_;
  std::vector<uint64_t> starts_;  // byte at which each record's line starts
  std::vector<int64_t> numbers_;  // line number of every kStride-th record
};

}  // namespace titanium

#include "titanium/data/jsonl.h"

#include <algorithm>

#include "titanium/base/error.h"
#include "titanium/formats/mapped_file.h"

namespace titanium {
namespace {

constexpr size_t kStride = 64;
constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";

bool blank(std::string_view line) {
  return line.find_first_not_of(" \t\r\n\v\f") == std::string_view::npos;
}

}  // namespace

JsonlFile::JsonlFile(const std::string& path) : path_(path) {
  try {
    file_ = std::make_shared<MappedFile>(path);
  } catch (const BadCheckpoint& e) {
    throw BadData("{}", e.what());
  }
  const auto bytes = file_->bytes();
  text_ = {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  index();
}

JsonlFile JsonlFile::from_text(std::string_view text, const std::string& name) {
  JsonlFile file;
  file.path_ = name;
  file.text_ = text;
  file.index();
  return file;
}

void JsonlFile::index() {
  size_t at = text_.starts_with(kByteOrderMark) ? kByteOrderMark.size() : 0;
  for (int64_t number = 1; at < text_.size(); ++number) {
    const size_t end = std::min(text_.find('\n', at), text_.size());
    if (!blank(text_.substr(at, end - at))) {
      if (starts_.size() % kStride == 0) numbers_.push_back(number);
      starts_.push_back(at);
    }
    at = end + 1;
  }
}

std::string_view JsonlFile::line(int64_t record) const {
  if (record < 0 || record >= size()) throw Bug("{} has no record {} of {}", path_, record, size());
  const size_t start = starts_[static_cast<size_t>(record)];
  std::string_view line = text_.substr(start, text_.find('\n', start) - start);
  if (line.ends_with('\r')) line.remove_suffix(1);
  return line;
}

int64_t JsonlFile::line_number(int64_t record) const {
  const char* start = line(record).data();
  const size_t mark = static_cast<size_t>(record) / kStride;
  return numbers_[mark] + std::count(text_.data() + starts_[mark * kStride], start, '\n');
}

std::string JsonlFile::where(int64_t record) const {
  return fmt::format("{}:{}", path_, line_number(record));
}

}  // namespace titanium

// JSON and whole files: read with limits and a position in every complaint, write so that a reader sees the
// old file or the new one and nothing between.
#pragma once
#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace titanium {

using Json = nlohmann::json;

struct JsonLimits {
  uint64_t max_bytes = uint64_t{1} << 28;
  int max_depth = 200;  // arrays and objects inside one another
};

// Strict JSON: a repeated key, bytes that are not UTF-8, or anything after the value is refused.  `source` is
// what messages call the text.  BadConfig with source, line, column and reason.
Json parse_json(std::string_view text, const std::string& source, const JsonLimits& limits = {});

// The same without an exception, for callers whose failure is of another kind: false, and `why` says where
// and what.
bool try_parse_json(std::string_view text, const JsonLimits& limits, Json* out, std::string* why);

Json read_json(const std::filesystem::path& path, const JsonLimits& limits = {});

// The whole file; BadConfig when it is not a regular file, cannot be read or is longer than max_bytes.
std::string read_file(const std::filesystem::path& path, uint64_t max_bytes = uint64_t{1} << 32);

// A temporary name beside `path`, fsync, rename, fsync of the folder.  BadCheckpoint with the system's
// reason; the old file, if any, is then untouched.
void write_file(const std::filesystem::path& path, std::string_view bytes);

// fsync of a folder, so that the names in it survive a power cut.  BadCheckpoint with the system's reason.
void sync_folder(const std::filesystem::path& folder);

}  // namespace titanium

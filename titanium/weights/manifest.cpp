#include "titanium/weights/manifest.h"

#include <charconv>

#include "titanium/base/error.h"
#include "titanium/weights/hash.h"

namespace titanium {
namespace {

namespace fs = std::filesystem;

constexpr const char* kFormat = "titanium checkpoint";
constexpr int64_t kVersion = 1;
constexpr const char* kManifest = "manifest.json";
constexpr const char* kComplete = "COMPLETE";
constexpr uint64_t kMaxManifest = uint64_t{1} << 32;

std::string hash_line(std::string_view text) {
  return to_hex(Hash64::of(std::as_bytes(std::span(text)))) + "\n";
}

std::string read(const fs::path& path) {
  try {
    return read_file(path, kMaxManifest);
  } catch (const BadConfig& error) {
    throw BadCheckpoint("{}", error.what());
  }
}

// Members of an object, checked; `where` is what messages call it.
struct Reader {
  const Json& json;
  std::string where;

  const Json& member(const char* key) const {
    if (!json.is_object() || !json.contains(key)) throw BadCheckpoint("{}: has no '{}'", where, key);
    return json[key];
  }
  std::string text(const char* key) const {
    const Json& value = member(key);
    if (!value.is_string())
      throw BadCheckpoint("{}: '{}' is {}, expected a string", where, key, value.dump());
    return value.get<std::string>();
  }
  int64_t count(const char* key) const { return count(member(key), key); }
  int64_t count(const Json& value, const char* key) const {
    if (!value.is_number_unsigned() || value.get<uint64_t>() > INT64_MAX) {
      throw BadCheckpoint("{}: '{}' is {}, expected an integer from 0 to 2^63-1", where, key, value.dump());
    }
    return value.get<int64_t>();
  }
  std::vector<int64_t> counts(const char* key) const {
    std::vector<int64_t> values;
    for (const Json& value : array(key)) values.push_back(count(value, key));
    return values;
  }
  const Json& array(const char* key) const {
    const Json& value = member(key);
    if (!value.is_array())
      throw BadCheckpoint("{}: '{}' is a {}, expected a list", where, key, value.type_name());
    return value;
  }
  uint64_t hash(const char* key) const {
    uint64_t value = 0;
    if (!parse_hex(text(key), &value))
      throw BadCheckpoint("{}: '{}' is '{}', expected 16 hex digits", where, key, text(key));
    return value;
  }
};

SavedFile read_file_entry(const Reader& r) {
  SavedFile file{r.text("name"), static_cast<uint64_t>(r.count("size")), r.hash("header_xxh64")};
  if (file.name.empty() || file.name == "." || file.name == ".." ||
      file.name.find_first_of(std::string_view("/\\\0", 3)) != file.name.npos) {
    throw BadCheckpoint("{}: file name '{}': a plain name in the same folder is expected", r.where,
                        file.name);
  }
  return file;
}

SavedSlice read_slice(const Reader& r, size_t files) {
  SavedSlice slice;
  slice.weight = r.text("weight");
  slice.state = r.text("state");
  slice.file = static_cast<size_t>(r.count("file"));
  if (slice.file >= files)
    throw BadCheckpoint("{}: 'file' is {}, there are {} files", r.where, slice.file, files);
  const auto dtype = parse_dtype(r.text("dtype"));
  if (!dtype || !is_floating(*dtype))
    throw BadCheckpoint("{}: dtype '{}' is not known", r.where, r.text("dtype"));
  slice.dtype = *dtype;
  slice.shape = r.counts("shape");
  int64_t numel = 1;
  for (int64_t d : slice.shape) {
    if (__builtin_mul_overflow(numel, d, &numel)) throw BadCheckpoint("{}: the shape overflows", r.where);
  }
  const std::vector<int64_t> range = r.counts("range");
  if (range.size() != 2 || range[0] >= range[1] || range[1] > numel) {
    throw BadCheckpoint("{}: range {} of a weight of {} elements", r.where, r.member("range").dump(), numel);
  }
  slice.begin = range[0];
  slice.end = range[1];
  slice.hash = r.hash("xxh64");
  return slice;
}

}  // namespace

void write_manifest(const fs::path& folder, const Manifest& manifest) {
  Json json = {
      {"format", kFormat},       {"version", kVersion},
      {"step", manifest.step},   {"optimizer", {{"name", manifest.optimizer}, {"updates", manifest.updates}}},
      {"train", manifest.train}, {"files", Json::array()},
      {"slices", Json::array()}};
  for (const SavedFile& file : manifest.files) {
    json["files"].push_back(
        {{"name", file.name}, {"size", file.size}, {"header_xxh64", to_hex(file.header_hash)}});
  }
  for (const SavedSlice& s : manifest.slices) {
    json["slices"].push_back({{"weight", s.weight},
                              {"state", s.state},
                              {"file", s.file},
                              {"dtype", name(s.dtype)},
                              {"shape", s.shape},
                              {"range", {s.begin, s.end}},
                              {"xxh64", to_hex(s.hash)}});
  }
  write_file(folder / kManifest, json.dump(1) + "\n");
}

void mark_complete(const fs::path& folder) {
  write_file(folder / kComplete, hash_line(read(folder / kManifest)));
}

Manifest read_manifest(const fs::path& folder) {
  std::error_code error;
  if (!fs::is_directory(folder, error)) throw BadCheckpoint("{}: is not a folder", folder.string());
  if (!fs::exists(folder / kComplete, error)) {
    throw BadCheckpoint("{}: is not a complete checkpoint (no file {})", folder.string(), kComplete);
  }
  const fs::path path = folder / kManifest;
  const std::string text = read(path);
  if (read(folder / kComplete) != hash_line(text)) {
    throw BadCheckpoint("{}: its checksum is not the one in {}", path.string(), kComplete);
  }
  Json json;
  std::string why;
  JsonLimits limits;
  limits.max_bytes = kMaxManifest;
  if (!try_parse_json(text, limits, &json, &why))
    throw BadCheckpoint("{}: not valid JSON: {}", path.string(), why);

  const Reader r{json, path.string()};
  if (r.text("format") != kFormat) throw BadCheckpoint("{}: is not a {}", path.string(), kFormat);
  if (r.count("version") != kVersion) {
    throw BadCheckpoint("{}: version {}, this program reads version {}", path.string(), r.count("version"),
                        kVersion);
  }
  Manifest manifest;
  manifest.step = r.count("step");
  const Reader optimizer{r.member("optimizer"), path.string() + ": optimizer"};
  manifest.optimizer = optimizer.text("name");
  manifest.updates = optimizer.count("updates");
  manifest.train = r.member("train");
  for (const Json& entry : r.array("files")) {
    manifest.files.push_back(read_file_entry({entry, path.string() + ": files"}));
    const SavedFile& file = manifest.files.back();
    const uint64_t size = fs::file_size(folder / file.name, error);
    if (error) throw BadCheckpoint("{}: {}", (folder / file.name).string(), error.message());
    if (size != file.size) {
      throw BadCheckpoint("{}: has {} bytes, {} were saved", (folder / file.name).string(), size, file.size);
    }
  }
  for (const Json& entry : r.array("slices")) {
    manifest.slices.push_back(read_slice({entry, path.string() + ": slices"}, manifest.files.size()));
  }
  return manifest;
}

std::string checkpoint_name(int64_t step) {
  return fmt::format("step-{}", step);
}

bool parse_checkpoint_name(const std::string& name, int64_t* step, std::string* ending) {
  constexpr std::string_view kPrefix = "step-";
  if (!name.starts_with(kPrefix)) return false;
  const char* begin = name.data() + kPrefix.size();
  const char* end = name.data() + name.size();
  const auto [stop, error] = std::from_chars(begin, end, *step);
  if (error != std::errc() || *step < 0) return false;
  ending->assign(stop, end);
  if (*ending != "" && *ending != ".partial" && *ending != ".replaced") return false;
  return name == checkpoint_name(*step) + *ending;  // no leading zeros
}

}  // namespace titanium

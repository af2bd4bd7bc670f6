#include "titanium/weights/manifest.h"

#include <algorithm>
#include <charconv>

#include "titanium/base/error.h"
#include "titanium/formats/safetensors.h"
#include "titanium/weights/hash.h"

namespace titanium {
namespace {

namespace fs = std::filesystem;

constexpr const char* kFormat = "titanium checkpoint";
constexpr int64_t kVersion = 2;
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
  uint64_t hash(const char* key) const { return hashes(key, 1)[0]; }
  std::vector<uint64_t> hashes(const char* key, uint64_t count) const {
    const std::string digits = text(key);
    std::vector<uint64_t> values(digits.size() / 16);
    bool good = digits.size() % 16 == 0 && values.size() == count;
    for (size_t i = 0; good && i < values.size(); ++i)
      good = parse_hex(digits.substr(16 * i, 16), &values[i]);
    if (!good) {
      throw BadCheckpoint("{}: '{}' is '{}', expected 16 hex digits{}", where, key, digits.substr(0, 64),
                          count == 1 ? "" : fmt::format(" {} times", count));
    }
    return values;
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

int64_t product(const Reader& r, const std::vector<int64_t>& sizes) {
  int64_t n = 1;
  for (int64_t d : sizes) {
    if (__builtin_mul_overflow(n, d, &n)) throw BadCheckpoint("{}: the shape overflows", r.where);
  }
  return n;
}

// "range", counted in "columns" where they are given.
Piece read_piece(const Reader& r, const std::vector<int64_t>& shape) {
  int64_t numel = product(r, shape);
  Piece piece;
  piece.width = std::max<int64_t>(1, shape.empty() || shape[0] == 0 ? 1 : numel / shape[0]);
  piece.column_end = piece.width;
  if (r.json.contains("columns")) {
    const std::vector<int64_t> columns = r.counts("columns");
    if (shape.size() != 2 || columns.size() != 2 || columns[0] >= columns[1] || columns[1] > shape[1]) {
      throw BadCheckpoint("{}: columns {} of a weight of shape {}", r.where, r.member("columns").dump(),
                          r.member("shape").dump());
    }
    piece.column_begin = columns[0];
    piece.column_end = columns[1];
    numel = shape[0] * piece.columns();
  }
  const std::vector<int64_t> range = r.counts("range");
  if (range.size() != 2 || range[0] >= range[1] || range[1] > numel) {
    throw BadCheckpoint("{}: range {} of a weight of {} elements", r.where, r.member("range").dump(), numel);
  }
  piece.begin = range[0];
  piece.end = range[1];
  return piece;
}

SavedSlice read_slice(const Reader& r, size_t files, uint64_t hashed) {
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
  slice.piece = read_piece(r, slice.shape);
  const TensorSpec spec{slice.weight, slice.dtype, {slice.piece.count()}};
  slice.hashes = r.hashes("xxh64", (spec.nbytes() - 1) / hashed + 1);
  return slice;
}

Json to_json(const SavedFile& file) {
  return {{"name", file.name}, {"size", file.size}, {"header_xxh64", to_hex(file.header_hash)}};
}

Json to_json(const SavedSlice& s) {
  std::string hashes;
  for (const uint64_t hash : s.hashes) hashes += to_hex(hash);
  Json json = {{"weight", s.weight},        {"state", s.state}, {"file", s.file},
               {"dtype", name(s.dtype)},    {"shape", s.shape}, {"range", {s.piece.begin, s.piece.end}},
               {"xxh64", std::move(hashes)}};
  if (!s.piece.all_columns()) json["columns"] = {s.piece.column_begin, s.piece.column_end};
  return json;
}

void put_saved(const Manifest& manifest, Json& json) {
  json["files"] = Json::array();
  json["slices"] = Json::array();
  for (const SavedFile& file : manifest.files) json["files"].push_back(to_json(file));
  for (const SavedSlice& slice : manifest.slices) json["slices"].push_back(to_json(slice));
}

void read_saved(const Json& json, const std::string& where, Manifest& manifest) {
  const Reader r{json, where};
  const size_t first = manifest.files.size();
  for (const Json& entry : r.array("files"))
    manifest.files.push_back(read_file_entry({entry, where + ": files"}));
  for (const Json& entry : r.array("slices")) {
    manifest.slices.push_back(
        read_slice({entry, where + ": slices"}, manifest.files.size() - first, manifest.hashed));
    manifest.slices.back().file += first;
  }
}

Json parse(const std::string& text, const std::string& where) {
  Json json;
  std::string why;
  JsonLimits limits;
  limits.max_bytes = kMaxManifest;
  if (!try_parse_json(text, limits, &json, &why)) throw BadCheckpoint("{}: not valid JSON: {}", where, why);
  return json;
}

}  // namespace

void write_manifest(const fs::path& folder, const Manifest& manifest) {
  Json json = {{"format", kFormat},
               {"version", kVersion},
               {"step", manifest.step},
               {"optimizer", {{"name", manifest.optimizer}, {"updates", manifest.updates}}},
               {"train", manifest.train}};
  put_saved(manifest, json);
  write_file(folder / kManifest, json.dump(1) + "\n");
}

std::string saved_text(const Manifest& manifest) {
  Json json = Json::object();
  put_saved(manifest, json);
  return json.dump();
}

void add_saved(const std::string& text, Manifest& manifest) {
  read_saved(parse(text, "what a rank saved"), "what a rank saved", manifest);
}

void mark_complete(const fs::path& folder) {
  write_file(folder / kComplete, hash_line(read(folder / kManifest)));
}

void check_files(const fs::path& folder, const Manifest& manifest) {
  for (const SavedFile& file : manifest.files) {
    std::error_code error;
    const uint64_t size = fs::file_size(folder / file.name, error);
    if (error) throw BadCheckpoint("{}: {}", (folder / file.name).string(), error.message());
    if (size != file.size) {
      throw BadCheckpoint("{}: has {} bytes, {} were saved", (folder / file.name).string(), size, file.size);
    }
  }
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
  const Json json = parse(text, path.string());
  const Reader r{json, path.string()};
  if (r.text("format") != kFormat) throw BadCheckpoint("{}: is not a {}", path.string(), kFormat);
  const int64_t version = r.count("version");
  if (version < 1 || version > kVersion) {
    throw BadCheckpoint("{}: version {}, this program reads versions 1 to {}", path.string(), version,
                        kVersion);
  }
  Manifest manifest;
  if (version == 1) manifest.hashed = UINT64_MAX;
  manifest.step = r.count("step");
  const Reader optimizer{r.member("optimizer"), path.string() + ": optimizer"};
  manifest.optimizer = optimizer.text("name");
  manifest.updates = optimizer.count("updates");
  manifest.train = r.member("train");
  read_saved(json, path.string(), manifest);
  check_files(folder, manifest);
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

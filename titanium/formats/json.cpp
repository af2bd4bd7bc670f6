#include "titanium/formats/json.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <unordered_set>
#include <vector>

#include "titanium/base/error.h"

namespace titanium {
namespace {

// Thrown out of the parser's callback, caught in this file.
struct Refused {
  std::string reason;
};

// nlohmann writes "[json.exception.parse_error.101] parse error at line 1, column 2: ..."; keep what follows.
std::string reason_of(const std::exception& error) {
  const std::string_view text = error.what();
  const size_t at = text.find("] ");
  return std::string(at == std::string_view::npos ? text : text.substr(at + 2));
}

// An open file that closes itself.
struct Fd {
  int value = -1;
  ~Fd() {
    if (value >= 0) ::close(value);
  }
};

}  // namespace

bool try_parse_json(std::string_view text, const JsonLimits& limits, Json* out, std::string* why) {
  if (text.size() > limits.max_bytes) {
    *why = fmt::format("{} bytes of JSON, allowed are {}", text.size(), limits.max_bytes);
    return false;
  }
  // The parser below takes a zero byte for the end of the text.
  if (const size_t zero = text.find('\0'); zero != text.npos) {
    *why = fmt::format("byte {} is zero", zero);
    return false;
  }
  std::vector<std::unordered_set<std::string>> keys;  // of the objects that are open
  const auto watch = [&](int depth, Json::parse_event_t event, Json& parsed) {
    switch (event) {
      case Json::parse_event_t::object_start:
        keys.emplace_back();
        [[fallthrough]];
      case Json::parse_event_t::array_start:
        if (depth >= limits.max_depth) {
          throw Refused{fmt::format("nested deeper than {} levels", limits.max_depth)};
        }
        break;
      case Json::parse_event_t::object_end:
        keys.pop_back();
        break;
      case Json::parse_event_t::key: {
        auto [at, fresh] = keys.back().insert(parsed.get<std::string>());
        if (!fresh) throw Refused{fmt::format("key '{}' is given twice in one object", *at)};
        break;
      }
      default:
        break;
    }
    return true;
  };
  try {
    *out = Json::parse(text.begin(), text.end(), watch);
    return true;
  } catch (const Refused& refused) {
    *why = refused.reason;
  } catch (const Json::exception& error) {
    *why = reason_of(error);
  }
  return false;
}

Json parse_json(std::string_view text, const std::string& source, const JsonLimits& limits) {
  Json json;
  std::string why;
  if (!try_parse_json(text, limits, &json, &why)) throw BadConfig("{}: not valid JSON: {}", source, why);
  return json;
}

Json read_json(const std::filesystem::path& path, const JsonLimits& limits) {
  return parse_json(read_file(path, limits.max_bytes), path.string(), limits);
}

std::string read_file(const std::filesystem::path& path, uint64_t max_bytes) {
  // Non-blocking, so that a named pipe is refused below instead of waited for.
  const Fd fd{::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
  if (fd.value < 0) throw BadConfig("{}: cannot be opened: {}", path.string(), std::strerror(errno));
  struct stat status {};
  if (::fstat(fd.value, &status) != 0 || !S_ISREG(status.st_mode)) {
    throw BadConfig("{}: is not a regular file", path.string());
  }
  const auto size = static_cast<uint64_t>(status.st_size);
  if (size > max_bytes) {
    throw BadConfig("{}: is {} bytes long, allowed are {}", path.string(), size, max_bytes);
  }
  std::string bytes;
  bytes.reserve(size + 1);
  std::vector<char> piece(1 << 16);
  while (true) {
    const ssize_t n = ::read(fd.value, piece.data(), piece.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw BadConfig("{}: cannot be read: {}", path.string(), std::strerror(errno));
    if (n == 0) return bytes;
    bytes.append(piece.data(), static_cast<size_t>(n));
    if (bytes.size() > max_bytes) throw BadConfig("{}: is longer than {} bytes", path.string(), max_bytes);
  }
}

void write_file(const std::filesystem::path& path, std::string_view bytes) {
  static std::atomic<uint64_t> count{0};  // keeps the names of two threads apart, nothing else
  auto partial = path;
  partial += fmt::format(".partial-{}-{}", ::getpid(), count.fetch_add(1));
  const auto fail = [&](const char* what) {
    const int error = errno;
    ::unlink(partial.c_str());
    throw BadCheckpoint("{}: {}: {}", path.string(), what, std::strerror(error));
  };

  {
    Fd fd{::open(partial.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666)};
    if (fd.value < 0) fail("cannot be created");
    std::string_view rest = bytes;
    while (!rest.empty()) {
      const ssize_t n = ::write(fd.value, rest.data(), std::min<size_t>(rest.size(), 1 << 30));
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) fail("cannot be written");
      rest.remove_prefix(static_cast<size_t>(n));
    }
    if (::fsync(fd.value) != 0) fail("cannot be flushed to disk");
    const int closed = ::close(fd.value);
    fd.value = -1;
    if (closed != 0) fail("cannot be closed");
  }
  if (::rename(partial.c_str(), path.c_str()) != 0) fail("cannot be renamed into place");
  const auto folder = path.parent_path();
  sync_folder(folder.empty() ? "." : folder);
}

void sync_folder(const std::filesystem::path& folder) {
  const Fd fd{::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)};
  if (fd.value < 0) throw BadCheckpoint("{}: cannot be opened: {}", folder.string(), std::strerror(errno));
  // Some network file systems cannot sync a folder and say EINVAL; there is nothing more to do there.
  if (::fsync(fd.value) != 0 && errno != EINVAL) {
    throw BadCheckpoint("{}: cannot be flushed to disk: {}", folder.string(), std::strerror(errno));
  }
}

}  // namespace titanium

#include "titanium/report/tensorboard.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cstring>

#include "titanium/base/error.h"
#include "titanium/report/files.h"

namespace titanium {
namespace {

constexpr std::array<uint32_t, 256> crc_table() {
  constexpr uint32_t kPolynomial = 0x82f63b78;  // Castagnoli, bits reversed
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t crc = i;
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ ((crc & 1) != 0 ? kPolynomial : 0);
    table[i] = crc;
  }
  return table;
}
constexpr std::array<uint32_t, 256> kCrcTable = crc_table();

template <typename T>
void append_little_endian(std::string& out, T value) {
  for (size_t i = 0; i < sizeof(T); ++i) out += static_cast<char>(value >> (8 * i) & 0xff);
}

// Protobuf's wire format: a field is (number << 3 | type), then its value.
enum class Wire { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

void append_varint(std::string& out, uint64_t value) {
  for (; value >= 0x80; value >>= 7) out += static_cast<char>(value | 0x80);
  out += static_cast<char>(value);
}

void append_tag(std::string& out, uint32_t field, Wire wire) {
  append_varint(out, field << 3 | static_cast<uint32_t>(wire));
}

void append_bytes(std::string& out, uint32_t field, std::string_view bytes) {
  append_tag(out, field, Wire::kBytes);
  append_varint(out, bytes.size());
  out += bytes;
}

void append_integer(std::string& out, uint32_t field, int64_t value) {
  append_tag(out, field, Wire::kVarint);
  append_varint(out, static_cast<uint64_t>(value));
}

// Event: wall_time = 1, step = 2, file_version = 3, summary = 5, session_log = 7.
std::string event(double wall_time) {
  std::string out;
  append_tag(out, 1, Wire::kFixed64);
  append_little_endian(out, std::bit_cast<uint64_t>(wall_time));
  return out;
}

// SessionLog: status = 1, where START is 1.  TensorBoard then drops what it had from this step on.
std::string session_start_event(double wall_time, int64_t step) {
  std::string log;
  append_integer(log, 1, 1);
  std::string out = event(wall_time);
  append_integer(out, 2, step);
  append_bytes(out, 7, log);
  return out;
}

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

}  // namespace

uint32_t crc32c(std::string_view bytes) {
  uint32_t crc = ~uint32_t{0};
  for (const char c : bytes) crc = crc >> 8 ^ kCrcTable[(crc ^ static_cast<uint8_t>(c)) & 0xff];
  return ~crc;
}

uint32_t masked_crc32c(std::string_view bytes) {
  return std::rotr(crc32c(bytes), 15) + 0xa282ead8u;
}

std::string tfrecord(std::string_view message) {
  std::string out;
  append_little_endian<uint64_t>(out, message.size());
  append_little_endian(out, masked_crc32c(out));
  out += message;
  append_little_endian(out, masked_crc32c(message));
  return out;
}

std::string version_event(double wall_time) {
  std::string out = event(wall_time);
  append_bytes(out, 3, "brain.Event:2");
  return out;
}

std::string scalar_event(double wall_time, int64_t step, std::string_view tag, float value) {
  // Summary: value = 1, of {tag = 1, simple_value = 2}.
  std::string entry;
  append_bytes(entry, 1, tag);
  append_tag(entry, 2, Wire::kFixed32);
  append_little_endian(entry, std::bit_cast<uint32_t>(value));
  std::string summary;
  append_bytes(summary, 1, entry);

  std::string out = event(wall_time);
  append_integer(out, 2, step);
  append_bytes(out, 5, summary);
  return out;
}

TensorBoardWriter::TensorBoardWriter(const std::filesystem::path& folder, int64_t purge_step) {
  make_folder(folder);
  std::array<char, 256> host{};  // stays empty where the system does not say
  static_cast<void>(gethostname(host.data(), host.size() - 1));
  const double now = seconds_now();
  // A name that is not there yet: several writers may start within one second.
  for (int n = 0; fd_ < 0; ++n) {
    path_ = folder / fmt::format("events.out.tfevents.{:010}.{}.{}.{}", static_cast<int64_t>(now),
                                 host.data(), getpid(), n);
    fd_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_APPEND | O_CLOEXEC, 0644);
    if (fd_ < 0 && errno != EEXIST) {
      throw BadConfig("{}: cannot make the file: {}", path_.string(), std::strerror(errno));
    }
  }
  append(version_event(now));
  if (purge_step >= 0) append(session_start_event(now, purge_step));
}

TensorBoardWriter::~TensorBoardWriter() {
  ::close(fd_);
}

bool TensorBoardWriter::append(const std::string& message) {
  return append_whole(fd_, tfrecord(message));
}

bool TensorBoardWriter::scalar(std::string_view tag, int64_t step, double value) {
  return append(scalar_event(seconds_now(), step, tag, static_cast<float>(value)));
}

}  // namespace titanium

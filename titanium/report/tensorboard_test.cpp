#include "titanium/report/tensorboard.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <optional>
#include <vector>

#include "titanium/base/error.h"

namespace titanium {
namespace {

// A second implementation of the checksum, one bit at a time, so that the table is not its own judge.
uint32_t slow_crc32c(std::string_view bytes) {
  uint32_t crc = 0xffffffffu;
  for (const char c : bytes) {
    crc ^= static_cast<uint8_t>(c);
    for (int bit = 0; bit < 8; ++bit) crc = (crc & 1) != 0 ? crc >> 1 ^ 0x82f63b78u : crc >> 1;
  }
  return ~crc;
}

TEST(Crc32c, KnownAnswers) {
  EXPECT_EQ(crc32c("123456789"), 0xe3069283u);            // the check value of the Castagnoli CRC
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8a9136aau);  // RFC 3720, B.4
  EXPECT_EQ(crc32c(std::string(32, '\xff')), 0x62a8ab43u);
  EXPECT_EQ(crc32c(""), 0u);
}

struct Reader {
  std::string_view bytes;
  template <typename T>
  T fixed() {
    T value = 0;
    for (size_t i = 0; i < sizeof(T); ++i)
      value |= static_cast<T>(static_cast<uint8_t>(bytes.at(i))) << (8 * i);
    bytes.remove_prefix(sizeof(T));
    return value;
  }
  uint64_t varint() {
    uint64_t value = 0;
    for (int shift = 0;; shift += 7) {
      const auto byte = static_cast<uint8_t>(bytes.at(0));
      bytes.remove_prefix(1);
      value |= static_cast<uint64_t>(byte & 0x7f) << shift;
      if (byte < 0x80) return value;
    }
  }
  std::string_view take(uint64_t n) {
    const std::string_view out = bytes.substr(0, n);
    EXPECT_EQ(out.size(), n);
    bytes.remove_prefix(out.size());
    return out;
  }
};

struct Event {
  double wall_time = 0;
  std::optional<int64_t> step;
  std::string version, tag;
  std::optional<float> value;
  std::optional<uint64_t> session;
};

void read_value(std::string_view bytes, Event& event) {
  for (Reader in{bytes}; !in.bytes.empty();) {
    const uint64_t key = in.varint();
    if (key == (1 << 3 | 2)) {
      event.tag = in.take(in.varint());
    } else if (key == (2 << 3 | 5)) {
      event.value = std::bit_cast<float>(in.fixed<uint32_t>());
    } else {
      ADD_FAILURE() << "field " << key;
      return;
    }
  }
}

Event read_event(std::string_view bytes) {
  Event event;
  for (Reader in{bytes}; !in.bytes.empty();) {
    switch (const uint64_t key = in.varint()) {
      case 1 << 3 | 1:
        event.wall_time = std::bit_cast<double>(in.fixed<uint64_t>());
        break;
      case 2 << 3 | 0:
        event.step = static_cast<int64_t>(in.varint());
        break;
      case 3 << 3 | 2:
        event.version = in.take(in.varint());
        break;
      case 5 << 3 | 2: {
        Reader summary{in.take(in.varint())};
        EXPECT_EQ(summary.varint(), uint64_t{1 << 3 | 2});
        read_value(summary.take(summary.varint()), event);
        EXPECT_TRUE(summary.bytes.empty());
        break;
      }
      case 7 << 3 | 2: {
        Reader log{in.take(in.varint())};
        EXPECT_EQ(log.varint(), uint64_t{1 << 3 | 0});
        event.session = log.varint();
        break;
      }
      default:
        ADD_FAILURE() << "field " << key;
        return event;
    }
  }
  return event;
}

uint32_t unmask(uint32_t masked) {
  const uint32_t rotated = masked - 0xa282ead8u;
  return rotated >> 17 | rotated << 15;
}

std::vector<Event> read_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  const std::string bytes{std::istreambuf_iterator<char>(file), {}};
  std::vector<Event> events;
  for (Reader in{bytes}; !in.bytes.empty();) {
    const std::string_view length_bytes = in.bytes.substr(0, 8);
    const auto length = in.fixed<uint64_t>();
    EXPECT_EQ(unmask(in.fixed<uint32_t>()), slow_crc32c(length_bytes));
    const std::string_view message = in.take(length);
    EXPECT_EQ(unmask(in.fixed<uint32_t>()), slow_crc32c(message));
    events.push_back(read_event(message));
  }
  return events;
}

TEST(TensorBoard, WritesWhatReadsBack) {
  std::string name = (std::filesystem::temp_directory_path() / "titanium_tb_XXXXXX").string();
  ASSERT_NE(mkdtemp(name.data()), nullptr);
  const std::filesystem::path folder = std::filesystem::path(name) / "deep" / "tb";
  std::filesystem::path path, second;
  {
    TensorBoardWriter writer(folder);
    path = writer.path();
    EXPECT_TRUE(writer.scalar("loss/train", 1, 2.5));
    EXPECT_TRUE(writer.scalar("lr", 300, 1e-5));
    EXPECT_TRUE(writer.scalar(std::string(300, 't'), int64_t{1} << 40, std::nan("")));
    TensorBoardWriter resumed(folder, 300);  // in the same second
    second = resumed.path();
    EXPECT_TRUE(resumed.scalar("lr", 300, 2e-5));
  }
  EXPECT_NE(path, second);
  EXPECT_TRUE(path.filename().string().starts_with("events.out.tfevents.")) << path;

  const std::vector<Event> events = read_file(path);
  ASSERT_EQ(events.size(), 4u);
  EXPECT_EQ(events[0].version, "brain.Event:2");
  EXPECT_GT(events[0].wall_time, 1.6e9);
  EXPECT_EQ(events[1].tag, "loss/train");
  EXPECT_EQ(events[1].step, 1);
  EXPECT_EQ(events[1].value, 2.5f);
  EXPECT_EQ(events[2].step, 300);
  EXPECT_EQ(events[2].value, 1e-5f);
  EXPECT_EQ(events[3].tag.size(), 300u);
  EXPECT_EQ(events[3].step, int64_t{1} << 40);
  EXPECT_TRUE(std::isnan(*events[3].value));

  const std::vector<Event> more = read_file(second);
  ASSERT_EQ(more.size(), 3u);
  EXPECT_EQ(more[1].session, 1u);  // START
  EXPECT_EQ(more[1].step, 300);
  EXPECT_EQ(more[2].value, 2e-5f);
  std::filesystem::remove_all(name);
}

TEST(TensorBoard, RefusesAFolderItCannotMake) {
  EXPECT_THROW(TensorBoardWriter("/proc/nowhere/tb"), BadConfig);
}

}  // namespace
}  // namespace titanium

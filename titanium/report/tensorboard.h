// TensorBoard event files with scalars.
//
// A file is a sequence of TFRecords: length (u64), its masked CRC-32C, an Event message, its masked CRC-32C,
// all little endian (tensorflow/core/lib/io/record_writer.h).  Event and Summary are protobuf
// (tensorflow/core/util/event.proto, framework/summary.proto) and small enough to write by hand.
#pragma once
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

namespace titanium {

uint32_t crc32c(std::string_view bytes);  // Castagnoli, as in RFC 3720
uint32_t masked_crc32c(std::string_view bytes);

std::string tfrecord(std::string_view message);
std::string version_event(double wall_time);  // file_version "brain.Event:2", the first of a file
std::string scalar_event(double wall_time, int64_t step, std::string_view tag, float value);

class TensorBoardWriter {
 public:
  // Makes `folder` and a new file events.out.tfevents.<seconds>.<host>.<pid>.<n> in it.  A resumed run starts
  // another file beside the old; purge_step >= 0 tells TensorBoard to forget what older files hold from that
  // step on. BadConfig with path and reason.
  explicit TensorBoardWriter(const std::filesystem::path& folder, int64_t purge_step = -1);
  ~TensorBoardWriter();
  TensorBoardWriter(const TensorBoardWriter&) = delete;
  TensorBoardWriter& operator=(const TensorBoardWriter&) = delete;

  // False when the disk does not take it; the file then ends before this record.
  bool scalar(std::string_view tag, int64_t step, double value);
  const std::filesystem::path& path() const { return path_; }

 private:
  bool append(const std::string& message);
  std::filesystem::path path_;
  int fd_ = -1;
};

}  // namespace titanium

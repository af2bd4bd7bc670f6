#include "titanium/base/error.h"

namespace titanium {

void throw_error(ErrorKind kind, const std::string& message) {
  switch (kind) {
    case ErrorKind::kBadConfig:
      throw BadConfig("{}", message);
    case ErrorKind::kBadData:
      throw BadData("{}", message);
    case ErrorKind::kBadCheckpoint:
      throw BadCheckpoint("{}", message);
    case ErrorKind::kRankLost:
      throw RankLost("{}", message);
    case ErrorKind::kBug:
      break;
  }
  throw Bug("{}", message);
}

const char* name(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::kBadConfig:
      return "BadConfig";
    case ErrorKind::kBadData:
      return "BadData";
    case ErrorKind::kBadCheckpoint:
      return "BadCheckpoint";
    case ErrorKind::kRankLost:
      return "RankLost";
    case ErrorKind::kBug:
      return "Bug";
  }
  return "Unknown";
}

int exit_code(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::kBadConfig:
      return 2;
    case ErrorKind::kBadData:
      return 3;
    case ErrorKind::kBadCheckpoint:
      return 4;
    case ErrorKind::kRankLost:
      return 5;
    case ErrorKind::kBug:
      return 70;
  }
  return 70;
}

}  // namespace titanium

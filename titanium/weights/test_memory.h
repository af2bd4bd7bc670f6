// For tests of peak memory: each runs a disabled test of its own program in a process of its own, which
// prints "extra <KB> bytes <n>".
#pragma once
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>

namespace titanium::testing {

inline int64_t status_kb(const std::string& key) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with(key + ":")) return std::atoll(line.c_str() + key.size() + 1);
  }
  return -1;
}

struct Memory {
  long extra_kb = -1;
  unsigned long bytes = 0;
};

inline Memory memory_of(const std::string& disabled_test) {
  Memory memory;
  char self[4096] = {};
  EXPECT_GT(readlink("/proc/self/exe", self, sizeof self - 1), 0);
  const std::string command =
      fmt::format("'{}' --gtest_also_run_disabled_tests --gtest_filter={}", self, disabled_test);
  FILE* pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) return memory;
  char line[512];
  while (fgets(line, sizeof line, pipe) != nullptr)
    sscanf(line, "extra %ld bytes %lu", &memory.extra_kb, &memory.bytes);
  EXPECT_EQ(pclose(pipe), 0);
  return memory;
}

}  // namespace titanium::testing

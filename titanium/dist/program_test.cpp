#include "titanium/dist/program.h"

#include <gtest/gtest.h>

#include <sstream>
#include <string>

namespace titanium {
namespace {

TEST(Program, ItAndLibtorchHaveABuildId) {
  std::istringstream lines(program_identity());
  std::string program;
  ASSERT_TRUE(std::getline(lines, program));
  EXPECT_TRUE(program.starts_with("build ")) << program;
  EXPECT_EQ(program.find("unknown"), program.npos) << program;
  bool torch = false;
  for (std::string line; std::getline(lines, line);) torch |= line.starts_with("libtorch_cpu.so, build ");
  EXPECT_TRUE(torch);
}

}  // namespace
}  // namespace titanium

#include "titanium/config/hardware.h"

#include <gtest/gtest.h>

#include <map>
#include <string>

#include "titanium/base/error.h"

namespace titanium {
namespace {

const std::string kGood = R"([compute]
matmul = 1e12
matmul_backward = 9e11
attention = 5e11
attention_backward = 4e11
head = 8e11
action = 1e-5
[memory]
update = 1e10
copy = 2e10
[links]
bandwidth = 3e9
latency = 2e-5
[links.pp]
bandwidth = 1e9
)";

std::string refusal(std::string text) {
  try {
    Hardware::parse(text, "hw.toml");
  } catch (const BadConfig& e) {
    return e.what();
  }
  return "";
}
std::string changed(const std::string& from, const std::string& to) {
  std::string text = kGood;
  return text.replace(text.find(from), from.size(), to);
}

TEST(Hardware, IsReadAndWritten) {
  const Hardware h = Hardware::parse(kGood, "hw.toml");
  EXPECT_EQ(h.matmul, 1e12);
  EXPECT_EQ(h.action, 1e-5);
  EXPECT_EQ(h.capacity, 0);
  EXPECT_TRUE(h.overlap);
  EXPECT_EQ(h.tp.bandwidth, 3e9);
  EXPECT_EQ(h.pp.bandwidth, 1e9);
  EXPECT_EQ(h.pp.latency, 2e-5);
  const Hardware again = Hardware::parse(h.toml("# a comment\n"), "again");
  EXPECT_EQ(again.toml(""), h.toml(""));
  EXPECT_EQ(again.pp.bandwidth, 1e9);
}

TEST(Hardware, WhatIsWrongIsNamed) {
  const std::string rate = "allowed: a number from 1 to 1e+30";
  EXPECT_EQ(refusal(changed("head = 8e11\n", "")), "hw.toml: compute.head: is missing: FLOP/s of the head");
  EXPECT_EQ(refusal(changed("head = 8e11", "head = 0")), "hw.toml:6: compute.head = 0: " + rate);
  EXPECT_EQ(refusal(changed("head = 8e11", "head = 'fast'")), "hw.toml:6: compute.head = 'fast': " + rate);
  EXPECT_EQ(refusal(changed("head = 8e11", "head = [1]")), "hw.toml:6: compute.head = a list: " + rate);
  EXPECT_EQ(refusal(changed("action = 1e-5", "action = -1")),
            "hw.toml:7: compute.action = -1: allowed: a number from 0 to 1e+06");
  EXPECT_EQ(refusal(changed("latency = 2e-5", "overlap = 1")),
            "hw.toml:13: links.overlap = 1: allowed: true or false");
  // A step would take no time, or for ever.
  for (const auto& [number, shown] : std::map<std::string, std::string>{
           {"inf", "inf"}, {"nan", "nan"}, {"5e-324", "4.94066e-324"}, {"1e31", "1e+31"}, {"-1.0", "-1"}}) {
    EXPECT_EQ(refusal(changed("head = 8e11", "head = " + number)),
              "hw.toml:6: compute.head = " + shown + ": " + rate);
  }
  EXPECT_NE(refusal(changed("latency = 2e-5", "latency = 1e300")), "");
  EXPECT_EQ(refusal(changed("copy = 2e10", "copi = 2e10")),
            "hw.toml: memory.copy: is missing: bytes/s of casts");
  EXPECT_EQ(refusal(kGood + "latensy = 1\n"),
            "hw.toml:16: links.pp.latensy: unknown key; did you mean 'latency'?");
  EXPECT_EQ(refusal(kGood + "[quantum]\n"),
            "hw.toml:16: quantum: unknown key; there are: compute, memory, links");
  EXPECT_EQ(refusal(changed("bandwidth = 3e9\n", "")),
            "hw.toml: links.dp_shard.bandwidth: is missing: bytes/s into a rank");
  EXPECT_EQ(refusal("links = 3\n" + kGood.substr(0, kGood.find("[links]"))),
            "hw.toml:1: links: must be a section");
  EXPECT_NE(refusal("[compute\n").find("hw.toml:1: "), std::string::npos);
  EXPECT_THROW(Hardware::load("/no/such/file"), BadConfig);
}

}  // namespace
}  // namespace titanium

// Reads the reference values of tests/data/rl (see tests/data/README.md) for the tests of this room.
#pragma once
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "titanium/batch/pack.h"
#include "titanium/loss/rows.h"
#include "titanium/loss/token_stats.h"

namespace titanium::rl {

using Json = nlohmann::json;

// A case in one precision: in fp32 the inputs are rounded to float first, and the statistics are float
// tensors.
struct Case {
  std::string name;
  Json json;
  bool fp64 = true;

  const Json& params() const { return json.at("params"); }
  bool has(const char* input) const { return json.at("inputs").contains(input); }
  std::vector<int64_t> shape(const char* input) const {
    return json.at("inputs").at(input).at("shape").get<std::vector<int64_t>>();
  }
  Column input(const char* name) const {
    Column values = json.at("inputs").at(name).at("data").get<Column>();
    if (!fp64) {
      for (double& x : values) x = static_cast<float>(x);
    }
    return values;
  }
  std::vector<uint8_t> mask(const char* name) const {
    std::vector<uint8_t> out;
    for (double x : input(name)) out.push_back(x != 0);
    return out;
  }
  const Json& expected() const { return json.at(fp64 ? "expected_f64" : "expected_f32"); }
  // verl computes this estimator in fp32 whatever the inputs.
  bool reference_in_fp64() const { return fp64 && !name.starts_with("grpo_vectorized"); }
  at::ScalarType dtype() const { return fp64 ? at::kDouble : at::kFloat; }
};

inline std::vector<Case> cases(const std::string& group) {
  std::vector<Case> out;
  for (const auto& entry :
       std::filesystem::directory_iterator(TITANIUM_SOURCE_DIR "/tests/data/rl/" + group)) {
    const Json json = Json::parse(std::ifstream(entry.path()));
    for (bool fp64 : {true, false}) out.push_back({entry.path().stem().string(), json, fp64});
  }
  EXPECT_FALSE(out.empty()) << group;
  std::sort(out.begin(), out.end(), [](const Case& a, const Case& b) { return a.name < b.name; });
  return out;
}

// 1e-7 relative in fp64; 2e-6 (1 + |b|) in fp32, and where the reference itself was computed in fp32.
inline void expect_close(double a, double b, bool fp64, const std::string& what) {
  EXPECT_LE(std::abs(a - b), fp64 ? 1e-7 * std::abs(b) + 1e-13 : 2e-6 * (1 + std::abs(b)))
      << what << ": " << a << ", reference " << b << (fp64 ? " in fp64" : " in fp32");
}

inline void expect_values(const Column& actual, const Case& c, const char* name,
                          const std::vector<uint8_t>& only = {}) {
  const Json& node = c.expected().at(name);
  const bool fp64 = c.reference_in_fp64() && node.at("dtype") != "float32";
  const Column expected = node.at("data").get<Column>();
  ASSERT_EQ(actual.size(), expected.size()) << c.name << " " << name;
  for (size_t i = 0; i < actual.size(); ++i) {
    if (!only.empty() && !only[i]) continue;
    expect_close(actual[i], expected[i], fp64, c.name + " " + name + "[" + std::to_string(i) + "]");
  }
}
inline void expect_value(double actual, const Case& c, const char* name) {
  expect_values({actual}, c, name);
}

inline void expect_metrics(const Reports& reports, const Case& c) {
  for (const auto& [name, value] : c.expected().at("metrics").items()) {
    ASSERT_TRUE(reports.contains(name)) << c.name << ": no report " << name;
    expect_close(reports.at(name).value(), value.get<double>(), c.fp64, c.name + " " + name);
  }
}

// ---- rows [B, T] as documents of one given token and T answer tokens

struct Grid {
  int64_t B = 0, T = 0;
  std::vector<uint8_t> mask;              // [B, T]
  std::map<std::string, Column> columns;  // [B, T] each
};

inline std::vector<Sample> samples_of(const Grid& grid) {
  std::vector<Sample> samples;
  for (int64_t b = 0; b < grid.B; ++b) {
    Sample s;
    s.index = b;
    s.ids.assign(static_cast<size_t>(grid.T) + 1, 1);
    const auto row = [&](const auto& values, auto first) {
      std::vector<decltype(first)> out{first};
      out.insert(out.end(), values.begin() + b * grid.T, values.begin() + (b + 1) * grid.T);
      return out;
    };
    s.loss_mask = row(grid.mask, uint8_t{0});
    for (const auto& [name, column] : grid.columns) s.columns[name] = row(column, 0.0);
    samples.push_back(std::move(s));
  }
  return samples;
}

// One batch of the given rows of weighed samples, all of them by default.
inline PackedBatch batch_of(const std::vector<WeighedSample>& weighed, std::vector<int64_t> which = {}) {
  std::vector<const WeighedSample*> list;
  if (which.empty()) {
    for (const auto& w : weighed) list.push_back(&w);
  }
  for (int64_t i : which) list.push_back(&weighed[static_cast<size_t>(i)]);
  return pack_one(list);
}

inline Counts counts_of(const Case& c, const std::vector<Sample>& samples) {
  Counts counts = count(samples);
  const Json& p = c.params();
  const Json& info = p.contains("global_batch_info") ? p.at("global_batch_info") : p;
  if (info.contains("batch_num_tokens")) counts.tokens = info.at("batch_num_tokens");
  if (info.contains("global_batch_size")) counts.sequences = info.at("global_batch_size");
  return counts;
}
inline double dp_size(const Case& c) {
  const Json& p = c.params();
  const Json& info = p.contains("global_batch_info") ? p.at("global_batch_info") : p;
  return info.value("dp_size", 1.0);
}

// A statistic [B, T] as the head gives it for the batch of these rows, a leaf.
inline at::Tensor statistic(const Column& values, int64_t B, int64_t T, at::ScalarType dtype) {
  at::Tensor out = at::zeros({B, T + 1}, at::kDouble);
  out.narrow(1, 0, T).copy_(at::tensor(at::ArrayRef<double>(values), at::kDouble).view({B, T}));
  return out.flatten().to(dtype).clone().requires_grad_();
}
// A gradient of the batch back as [B, T], times dp_size.
inline Column rows_back(const at::Tensor& gradient, int64_t B, int64_t T, double scale = 1) {
  const at::Tensor g =
      (gradient.to(at::kDouble).view({B, T + 1}).narrow(1, 0, T) * scale).contiguous().flatten();
  return Column(g.const_data_ptr<double>(), g.const_data_ptr<double>() + g.numel());
}

inline at::Tensor gradient(const at::Tensor& loss, const at::Tensor& of) {
  return torch::autograd::grad({loss}, {of}, {}, /*retain_graph=*/true)[0];
}

}  // namespace titanium::rl

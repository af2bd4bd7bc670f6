// Far beyond the original context every kind of rope scaling gives transformers' log-probs (A10).  At
// position 0 all kinds agree, so only the last tokens of a long sequence are compared.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>

#include "titanium/formats/json.h"
#include "titanium/train/score.h"
#include "titanium/train/session.h"

namespace titanium {
namespace {

namespace fs = std::filesystem;
const fs::path kData = fs::path(TITANIUM_SOURCE_DIR) / "tests/data";

Json read(const fs::path& path) {
  std::ifstream file(path);
  return Json::parse(file);
}

struct Case {
  const char* variant;
  const char* spelling;
};
void PrintTo(const Case& c, std::ostream* os) {
  *os << c.variant << " as " << c.spelling;
}

class LongRope : public testing::TestWithParam<Case> {};

TEST_P(LongRope, A10LogProbsAtPosition9000) {
  const auto [variant, spelling] = GetParam();
  const Json expected = read(kData / "rope/expected.json");
  const Json& reference = expected.at("variants").at(variant);

  const fs::path folder = fs::path(testing::TempDir()) / (std::string("rope_") + variant + "_" + spelling);
  fs::create_directories(folder);
  fs::copy_file(kData / "models/llama3/model.safetensors", folder / "model.safetensors",
                fs::copy_options::overwrite_existing);
  Json config = read(kData / "models/llama3/config.json");
  config["max_position_embeddings"] = expected.at("max_position_embeddings");
  config.erase("rope_scaling");
  const Json& scaling = reference.at("rope_scaling");
  if (!scaling.is_null()) config[spelling] = scaling;
  if (std::string(spelling) == "rope_parameters") {
    config[spelling]["rope_theta"] = config["rope_theta"];
    config.erase("rope_theta");
    if (scaling.is_null()) config[spelling]["rope_type"] = "default";
  }
  std::ofstream(folder / "config.json") << config;

  LogOptions quiet;
  quiet.level = LogLevel::kOff;
  Log log(quiet);
  const TrainConfig run =
      load_train_config(std::nullopt, {"training.dtype=float64", "training.mixed_precision_param=float64",
                                       "training.mixed_precision_reduce=float64"});
  const Session session = open_session(folder, run, log);
  Sample sample;
  const int64_t tokens = expected.at("tokens");
  for (int64_t i = 0; i < tokens; ++i) {
    sample.ids.push_back(static_cast<int32_t>((i * i * 31 + 17 * i + 5) % 320));
  }
  sample.loss_mask.assign(sample.ids.size(), 1);
  const TokenScores scores = score_samples(*session.step, {sample}, tokens, "budget").at(0);

  const auto logprob = reference.at("logprob").get<std::vector<double>>();
  double largest = 0;
  for (size_t i = 0; i < logprob.size(); ++i) {
    const size_t at = scores.logprob.size() - logprob.size() + i;
    largest = std::max(largest, std::abs(scores.logprob[at] - logprob[i]));
  }
  // transformers forms the angles in fp32: 9000 * 2^-24 is half a milliradian.
  EXPECT_LE(largest, 1e-4);
}

INSTANTIATE_TEST_SUITE_P(Kinds, LongRope,
                         testing::Values(Case{"default", "rope_parameters"}, Case{"llama3", "rope_scaling"},
                                         Case{"llama3", "rope_parameters"}, Case{"linear", "rope_scaling"},
                                         Case{"yarn", "rope_scaling"}, Case{"yarn", "rope_parameters"},
                                         Case{"yarn_without_original", "rope_scaling"}));

}  // namespace
}  // namespace titanium

// A sample: the tokens of one sequence and which of them are trained on.
#pragma once
#include <cmath>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace titanium {

// Below it a logit over the temperature could leave the range of float32, and log-probs would be nan.
constexpr double kLeastTemperature = 1e-20;
inline bool is_temperature(double value) {
  return std::isfinite(value) && value >= kLeastTemperature;
}

struct Sample {
  std::vector<int32_t> ids;        // [n]
  std::vector<uint8_t> loss_mask;  // [n], 1: this token is trained on, so the position before it carries a
                                   // weight. Says nothing by token id: a final EOS is a token like any other.
  int64_t index = 0;               // its place in the step's global batch; what PackedBatch::sample holds
  double temperature = 1;          // of its log-probs; is_temperature
  int64_t group = -1;  // samples of one group (a pair, a prompt's answers) may be needed together; -1: none
  // What a loss knows of each token, by name: [n], entry i belongs to ids[i], as in loss_mask.
  std::map<std::string, std::vector<double>> columns{};
  std::map<std::string, double> seq_columns{};  // and of the whole sequence
  int64_t size() const { return static_cast<int64_t>(ids.size()); }
};

// Number of trained tokens that have a position to predict them: the first token of a sequence never has one.
// BadData where loss_mask and ids differ in length.
int64_t trained_tokens(const Sample& sample);

}  // namespace titanium

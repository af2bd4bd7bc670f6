// Both spellings of rope settings in a config.json: rope_theta + rope_scaling, or rope_parameters.
#include "titanium/config/hf_rope.h"

#include <algorithm>
#include <array>

#include "titanium/base/error.h"
#include "titanium/config/hf_reader.h"

namespace titanium {
namespace {

constexpr int64_t kMostPositions = int64_t{1} << 40;

// Keys that some rope type reads.  A key of another type than the file's is ignored, as transformers does.
constexpr std::array kKnown = {"rope_type",
                               "type",
                               "rope_theta",
                               "factor",
                               "low_freq_factor",
                               "mscale",
                               "beta_fast",
                               "original_max_position_embeddings",
                               "high_freq_factor",
                               "mscale_all_dim",
                               "beta_slow",
                               "attention_factor",
                               "truncate",
                               "finetuned",
                               "partial_rotary_factor"};

void refuse_unknown(const Json& object, const HfReader& in) {
  for (const auto& [key, value] : object.items()) {
    if (value.is_object()) in.fail(key, "rope settings for each layer type are not supported");
    if (value.is_null()) continue;
    if (std::find(kKnown.begin(), kKnown.end(), key) == kKnown.end()) {
      in.fail(key, "a rope setting that is not supported");
    }
  }
}

RopeType read_type(const HfReader& in) {
  const std::optional<std::string> now = in.text("rope_type"), before = in.text("type");
  if (now && before && *now != *before)
    in.fail("type", fmt::format("disagrees with rope_type = \"{}\"", *now));
  const std::string given = now ? *now : before.value_or("default");
  for (RopeType type : {RopeType::kDefault, RopeType::kLinear, RopeType::kLlama3, RopeType::kYarn}) {
    if (given == name(type)) return type;
  }
  in.fail(now ? "rope_type" : "type", "supported: default, linear, llama3, yarn");
}

// Context length before scaling: a key of the file, else of the rope settings, else the model's.
int64_t original_context(const HfReader& config, const HfReader& in) {
  const char* key = "original_max_position_embeddings";
  const auto outer = config.integer(key, 1, kMostPositions), inner = in.integer(key, 1, kMostPositions);
  if (outer && inner && *outer != *inner)
    in.fail(key, fmt::format("disagrees with {} = {} outside", key, *outer));
  if (outer || inner) return outer ? *outer : *inner;
  return config.need_integer("max_position_embeddings", 1, kMostPositions);
}

double read_theta(const HfReader& config, const HfReader& in) {
  const std::optional<double> outer = config.positive("rope_theta"), inner = in.positive("rope_theta");
  if (outer && inner && *outer != *inner)
    in.fail("rope_theta", fmt::format("disagrees with rope_theta = {}", *outer));
  const double theta = inner ? *inner : outer.value_or(10000.0);  // transformers' default_theta
  if (theta <= 1) throw BadConfig("{}: rope_theta = {}: allowed: a number > 1", config.source(), theta);
  return theta;
}

Rope read_settings(const HfReader& config, const Json& object, const std::string& key) {
  const HfReader in(object, config.source(), key + ".");
  refuse_unknown(object, in);
  if (in.number("partial_rotary_factor").value_or(1) != 1) {
    in.fail("partial_rotary_factor", "partial rotary embedding is not supported; allowed: 1");
  }
  Rope rope;
  rope.type = read_type(in);
  rope.theta = read_theta(config, in);
  switch (rope.type) {
    case RopeType::kDefault:
      break;
    case RopeType::kLinear:
      rope.factor = in.need_positive("factor");
      break;
    case RopeType::kLlama3:
      rope.factor = in.need_positive("factor");
      rope.low_freq_factor = in.need_positive("low_freq_factor");
      rope.high_freq_factor = in.need_positive("high_freq_factor");
      rope.original_max_position_embeddings = original_context(config, in);
      if (rope.high_freq_factor <= rope.low_freq_factor) {
        in.fail("high_freq_factor", fmt::format("allowed: above low_freq_factor = {}", rope.low_freq_factor));
      }
      break;
    case RopeType::kYarn:
      if (!in.has("factor")) in.fail_missing("factor");
      rope.original_max_position_embeddings = original_context(config, in);
      // A null factor means the ratio of the two contexts.
      rope.factor = in.positive("factor").value_or(
          static_cast<double>(config.need_integer("max_position_embeddings", 1, kMostPositions)) /
          static_cast<double>(rope.original_max_position_embeddings));
      rope.attention_factor = in.positive("attention_factor");
      rope.mscale = in.number("mscale");
      rope.mscale_all_dim = in.number("mscale_all_dim");
      // 0 counts as not given.
      if (const double beta = in.number("beta_fast").value_or(0); beta != 0) rope.beta_fast = beta;
      if (const double beta = in.number("beta_slow").value_or(0); beta != 0) rope.beta_slow = beta;
      rope.truncate = in.boolean("truncate").value_or(true);
      if (rope.beta_slow <= 0 || rope.beta_fast < rope.beta_slow) {
        in.fail("beta_fast", fmt::format("allowed: not below beta_slow = {}, which is > 0", rope.beta_slow));
      }
      break;
  }
  return rope;
}

}  // namespace

Rope read_rope(const Json& json, const std::string& source) {
  const HfReader config(json, source);
  if (config.number("partial_rotary_factor").value_or(1) != 1) {
    config.fail("partial_rotary_factor", "partial rotary embedding is not supported; allowed: 1");
  }
  std::optional<Rope> rope;
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    const Json* settings = config.find(key);
    if (settings == nullptr) continue;
    if (!settings->is_object()) config.fail(key, "allowed: an object or null");
    if (settings->empty()) continue;
    const Rope given = read_settings(config, *settings, key);
    if (rope && !(*rope == given)) config.fail(key, "disagrees with rope_scaling");
    rope = given;
  }
  if (!rope) {
    const Json none = Json::object();
    rope = read_settings(config, none, "rope_parameters");
  }
  return *rope;
}

}  // namespace titanium

#include "titanium/train/check.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>

#include "titanium/base/error.h"
#include "titanium/batch/pack.h"
#include "titanium/formats/json.h"
#include "titanium/formats/safetensors.h"
#include "titanium/loss/sft.h"
#include "titanium/rollout/generate.h"
#include "titanium/train/micro_batches.h"
#include "titanium/train/session.h"

namespace titanium {
namespace {

constexpr double kFp64Tolerance = 1e-9;

at::Tensor tensor_of(const SafetensorsFile& file, const std::string& name) {
  const TensorView& view = file.at(name);
  at::Tensor out = at::empty(view.shape, at::TensorOptions().dtype(scalar_type(view.dtype)));
  std::memcpy(out.data_ptr(), view.data, view.nbytes);
  return out;
}

std::vector<int64_t> ids_of(const SafetensorsFile& file, const std::string& name) {
  const at::Tensor ids = tensor_of(file, name).to(at::kLong).flatten().contiguous();
  return {ids.data_ptr<int64_t>(), ids.data_ptr<int64_t>() + ids.numel()};
}

// The reference file of a folder, which most models have not.
std::filesystem::path reference_file(const std::filesystem::path& folder) {
  require_model_folder(folder);
  const auto file = folder / "expected.safetensors";
  if (!std::filesystem::exists(file)) {
    throw BadConfig(
        "{}: is missing: check compares with reference values beside the model, as the fixtures have",
        file.string());
  }
  return file;
}

class Checker {
 public:
  Checker(const std::filesystem::path& folder, const TrainConfig& config, Log& log,
          std::shared_ptr<World> world)
      : config_(config),
        expected_(reference_file(folder)),
        meta_(read_json(folder / "meta.json")),
        session_(open_session(folder, config, log, /*load_weights=*/true, std::move(world))),
        fp64_(session_.store->dtypes().compute == at::kDouble),
        bf16_(session_.store->dtypes().compute == at::kBFloat16) {
    read_documents();
  }

  std::vector<CheckLine> run() {
    for (const auto& [temperature, suffix] : {std::pair{1.0, "t1"}, {0.7, "t07"}})
      statistics(temperature, suffix);
    gradients();
    const ParallelDims& dims = session_.store->mesh().dims();
    if (!bf16_ && dims.tp == 1 && dims.pp == 1) greedy();
    return std::move(lines_);
  }

 private:
  // The three documents as samples, weighted as the reference's loss is: sum(-log-prob mask) / sum(mask).
  void read_documents() {
    const auto ids = ids_of(expected_, "packed.input_ids"), bounds = ids_of(expected_, "packed.cu_seqlens");
    const at::Tensor mask = tensor_of(expected_, "packed.loss_mask").to(at::kDouble);
    const at::Tensor weight = mask / mask.sum();
    const auto tokens = static_cast<int64_t>(ids.size());
    starts_ = bounds;
    if (!std::is_sorted(bounds.begin(), bounds.end()) || bounds.empty() || bounds.front() < 0 ||
        bounds.back() > tokens || mask.dim() != 1 || mask.numel() != tokens) {
      throw BadCheckpoint(
          "{}: packed.cu_seqlens must rise inside the {} entries of packed.input_ids, and packed.loss_mask "
          "has {}",
          expected_.source(), tokens, mask.numel());
    }
    const double* w = weight.data_ptr<double>();
    for (size_t d = 0; d + 1 < bounds.size(); ++d) {
      WeighedSample s;
      s.sample.index = static_cast<int64_t>(d);
      s.sample.ids.assign(ids.begin() + bounds[d], ids.begin() + bounds[d + 1]);
      s.sample.loss_mask.assign(s.sample.ids.size(), 1);
      s.weight.assign(w + bounds[d], w + bounds[d + 1]);
      samples_.push_back(std::move(s));
    }
  }

  std::vector<PackedBatch> batches(double temperature) const {
    std::vector<WeighedSample> samples = samples_;
    for (WeighedSample& s : samples) s.sample.temperature = temperature;
    return share_of_rank(samples, config_.training, session_.store->mesh());
  }

  // The largest difference of any value of any rank's micro-batches from `want`, which is in the documents'
  // order.
  double largest_difference(const std::vector<PackedBatch>& batches, const std::vector<at::Tensor>& values,
                            const at::Tensor& want) const {
    at::Tensor most = at::zeros({2}, at::kDouble);  // the difference, and how many values were compared
    for (size_t b = 0; b < batches.size(); ++b) {
      for (int64_t d = 0; d < batches[b].documents(); ++d) {
        if (batches[b].sample[d] == kFiller) continue;
        const int64_t begin = batches[b].bounds[d], count = batches[b].bounds[d + 1] - begin;
        const at::Tensor difference = values[b].narrow(0, begin, count).to(at::kDouble) -
                                      want.narrow(0, starts_[batches[b].sample[d]], count);
        most[0] = at::maximum(most[0], difference.abs().max());
        most[1] += count;
      }
    }
    const Group& data = session_.store->mesh().data();
    if (const auto compared = static_cast<int64_t>(data.sum(most[1].item<double>()));
        compared != want.numel())
      throw Bug("check: {} of {} values were compared", compared, want.numel());
    data.all_reduce(most, ReduceOp::kMax);
    return most[0].item<double>();
  }

  double tolerance(const char* key, double temperature = 1) const {
    if (fp64_) return kFp64Tolerance;
    if (!bf16_) return meta_.at("tolerances").at(key).get<double>();
    // What plain bf16 arithmetic differs by.  The loss is a mean of log-probs, so its error is at most their
    // mean error; an error of logits counts 1 / temperature.
    const Json& bf16 = meta_.at("indicative_bf16_compute_vs_fp64");
    if (std::string(key) == "loss_atol") return bf16.at("logprob_mean_abs").get<double>();
    return 2 * bf16.at("logprob_max_abs").get<double>() / temperature;
  }
  std::string reference(const std::string& name) const { return fp64_ || bf16_ ? name + "_f64" : name; }

  void statistics(double temperature, const std::string& suffix) {
    const auto packed = batches(temperature);
    const auto stats = session_.step->score(packed, {.entropy = true}, HeadRows::kAll);
    std::vector<at::Tensor> logprob, entropy;
    for (const TokenStats& s : stats) {
      logprob.push_back(s.logprob);
      entropy.push_back(s.entropy);
    }
    const auto compare = [&](const char* what, const char* name, const std::vector<at::Tensor>& values,
                             const char* key) {
      const at::Tensor want =
          tensor_of(expected_, reference(std::string(name) + "_" + suffix)).to(at::kDouble);
      lines_.push_back({fmt::format("{} T={:g}", what, temperature), largest_difference(packed, values, want),
                        tolerance(key, temperature)});
    };
    compare("log-prob", "logprob", logprob, "logprob_atol");
    compare("entropy", "entropy", entropy, "entropy_atol");
  }

  void gradients() {
    ParamStore& store = *session_.store;
    store.zero_grad();
    const Mesh& mesh = store.mesh();
    const LossSum sum = session_.step->forward_backward(batches(1.0), SftLoss());
    const double loss = tensor_of(expected_, reference("loss")).to(at::kDouble).item<double>();
    lines_.push_back(
        {"loss", std::abs(mesh.data().sum(sum.loss.item<double>()) - loss), tolerance("loss_atol")});

    // Gradients are given in fp32 only.
    const double relative = bf16_ ? 0.1 : meta_.at("tolerances").at("grad_rel_l2").get<double>();
    std::map<std::string, double> differences;  // sums of squares of this rank's part
    double own_square = 0;
    for (const Slice& slice : store.slices()) {
      const at::Tensor got = slice.of(slice.unit->grad_shard()).to(at::kDouble);
      const at::Tensor want = tensor_of(expected_, "grad." + slice.weight->name()).to(at::kDouble).flatten();
      own_square += got.square().sum().item<double>();
      slice.each_run([&](const Slice::Run& run) {
        const at::Tensor error = got.narrow(0, run.begin, run.count) - want.narrow(0, run.global, run.count);
        differences[slice.weight->name()] += error.square().sum().item<double>();
      });
    }
    for (const auto& weight : store.table().weights()) {
      const double norm =
          tensor_of(expected_, "grad." + weight->name()).to(at::kDouble).norm().item<double>();
      const double difference = std::sqrt(mesh.copy().sum(differences[weight->name()]));
      lines_.push_back({"gradient " + weight->name(), norm > 0 ? difference / norm : difference,
                        norm > 0 ? relative : 1e-7});
    }
    const double square = mesh.copy().sum(own_square);
    const double norm = tensor_of(expected_, "grad_norm_f64").item<double>();
    lines_.push_back({"gradient norm (relative)", std::abs(std::sqrt(square) - norm) / norm,
                      fp64_ ? kFp64Tolerance : relative});
    store.release_grad();
  }

  void greedy() {
    const auto want = ids_of(expected_, "gen.output_ids");
    SamplingOptions options;
    options.max_new_tokens = static_cast<int64_t>(want.size());
    auto wrong = static_cast<int64_t>(want.size());
    try {
      const auto got =
          generate(*session_.model, *session_.store, {ids_of(expected_, "gen.prompt_ids")}, options);
      for (size_t i = 0; i < want.size(); ++i) wrong -= got[0].ids.at(i) == want[i];
    } catch (const BadData&) {  // logits that are not numbers: no id is right
    }
    lines_.push_back({"greedy ids (number that differ)", static_cast<double>(wrong), 0});
  }

  const TrainConfig& config_;
  SafetensorsFile expected_;
  Json meta_;
  Session session_;
  bool fp64_, bf16_;
  std::vector<WeighedSample> samples_;
  std::vector<int64_t> starts_;  // of the documents in the references
  std::vector<CheckLine> lines_;
};

}  // namespace

std::vector<CheckLine> check_model(const std::filesystem::path& folder, const TrainConfig& config, Log& log,
                                   std::shared_ptr<World> world) {
  try {
    return Checker(folder, config, log, std::move(world)).run();
  } catch (const Json::exception& e) {
    throw BadConfig("{}: is not the meta.json of a fixture: {}", (folder / "meta.json").string(), e.what());
  }
}

}  // namespace titanium

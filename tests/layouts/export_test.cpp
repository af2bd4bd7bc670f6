// A model's weights as they leave the ranks: its Hugging Face folder and the stream of full tensors.
#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <mutex>

#include "titanium/dist/run_ranks.h"
#include "titanium/formats/hf_tensors.h"
#include "titanium/formats/json.h"
#include "titanium/formats/test_util.h"
#include "titanium/train/session.h"
#include "titanium/weights/hf_export.h"
#include "titanium/weights/sync.h"

namespace titanium {
namespace {

namespace fs = std::filesystem;
using testing::TempFolder;
using Keys = std::vector<std::string>;

// In the order of the stream.
using Tensors = std::vector<std::pair<std::string, std::string>>;

// What every rank gets; with `folder`, they write that too.
std::vector<Tensors> leave(const std::string& model, int ranks, Keys keys, const fs::path& folder) {
  for (std::string& key : keys) key = "parallelism." + key;
  keys.emplace_back("training.mixed_precision_param=float32");
  const TrainConfig config = load_train_config(std::nullopt, keys);
  std::vector<Tensors> all(static_cast<size_t>(ranks));
  run_ranks(ranks, [&](std::shared_ptr<World> world) {
    LogOptions quiet;
    quiet.level = LogLevel::kOff;
    Log log(quiet);
    const Session session =
        open_session(fs::path(TITANIUM_SOURCE_DIR) / "tests/data/models" / model, config, log, true, world);
    TensorStream stream =
        get_per_tensor_param(*session.store, {.dtype = Dtype::F32, .tied_head = true, .bucket_bytes = 30000});
    while (auto tensor = stream.next()) {
      all[static_cast<size_t>(world->rank())].emplace_back(
          tensor->name, std::string(static_cast<const char*>(tensor->tensor.const_data_ptr()),
                                    static_cast<size_t>(tensor->tensor.nbytes())));
    }
    export_hf(*session.store, session.spec.config.to_json(Dtype::F32), folder, {.dtype = Dtype::F32});
  });
  return all;
}

class ExportOfAModel : public ::testing::TestWithParam<std::string> {};

// S3, F01: an untied head is the model's own, a tied one is there once, on whichever stages they are.
TEST_P(ExportOfAModel, IsTheOneOfOneRank) {
  const TempFolder folder;
  const fs::path source = fs::path(TITANIUM_SOURCE_DIR) / "tests/data/models" / GetParam();
  const Tensors one = leave(GetParam(), 1, {}, folder / "one").at(0);
  const HfTensors files(source);
  const auto bytes_of = [&](const std::string& name) {
    const TensorView& view = files.at(name);
    return std::string(reinterpret_cast<const char*>(view.data), view.nbytes);
  };
  for (const auto& [name, bytes] : one) {
    const bool tied = name == "lm_head.weight" && GetParam().ends_with("_tied");
    EXPECT_EQ(bytes, bytes_of(tied ? "model.embed_tokens.weight" : name)) << name;
  }
  const std::string written = read_file(folder / "one/model.safetensors");
  int count = 0;
  for (const auto& [ranks, keys] :
       {std::pair{2, Keys{"pipeline_parallel_degree=2"}},
        {2, {"pipeline_parallel_degree=2", "pipeline_parallel_schedule=ZBVZeroBubble"}},
        {3, {"pipeline_parallel_degree=3"}},
        {4, {"pipeline_parallel_degree=2", "data_parallel_shard_degree=2"}},
        {4,
         {"pipeline_parallel_degree=2", "tensor_parallel_degree=2", "pipeline_parallel_schedule=DualPipeV"}},
        {4, {"pipeline_parallel_degree=2", "data_parallel_replicate_degree=2"}}}) {
    SCOPED_TRACE(fmt::format("{} {}", keys.front(), keys.back()));
    const fs::path many = folder / std::to_string(++count);
    for (const Tensors& got : leave(GetParam(), ranks, keys, many)) EXPECT_TRUE(got == one);
    EXPECT_TRUE(read_file(many / "model.safetensors") == written);
    EXPECT_EQ(read_file(many / "config.json"), read_file(folder / "one/config.json"));
  }
}

INSTANTIATE_TEST_SUITE_P(Models, ExportOfAModel, ::testing::Values("llama3", "qwen3_tied", "qwen2"));

}  // namespace
}  // namespace titanium

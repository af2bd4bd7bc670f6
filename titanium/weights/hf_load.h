// A Hugging Face folder into a ParamStore.
#pragma once
#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "titanium/formats/hf_tensors.h"
#include "titanium/shard/param_store.h"

namespace titanium {

struct HfLoadOptions {
  // {other name, weight}: where the weight is shared by two blocks (a tied head), a file may hold it under
  // either name or both.
  std::vector<std::pair<std::string, std::string>> aliases = {
      {"lm_head.weight", "model.embed_tokens.weight"}};
  // Tensors that old checkpoints carry and no model reads: ignored, and reported.
  std::vector<std::string> ignored_endings = {"rotary_emb.inv_freq"};
  // Weights that the files may lack: their masters stay as they are, and they are reported as missing.
  std::vector<std::string> optional = {};
  // {name in the files, weight}: other names of a weight, used where its own is not there.
  std::vector<std::pair<std::string, std::string>> other_names = {};
};

struct HfLoadReport {
  int64_t tensors = 0;               // weights read, by all ranks together
  uint64_t bytes = 0;                // read from the files by this rank; the rest is the same on all ranks
  std::vector<std::string> ignored;  // tensors of the files that were not used, by name
  std::vector<std::string> missing;  // weights that stayed as they were (HfLoadOptions::optional)
  std::vector<Dtype> stored;         // the dtypes of the weights in the files, each once
};

// Called by all ranks of the store's mesh.  Each reads its own slices and nothing else of the files, converts
// F32, BF16, F16 or F64 to the masters' dtype.  BadCheckpoint, the same on all ranks, for a tensor that is
// missing, unexpected, of another shape or of a dtype that is no float, and for two names of a tied weight
// whose bytes differ; it names tensor, file and both shapes. Everything is checked, by every rank, before the
// first master is written.  BadConfig where ranks see other files: names, dtypes, shapes and the first bytes
// of each tensor are compared.
HfLoadReport load_hf(const HfTensors& tensors, ParamStore& store, const HfLoadOptions& options = {});
HfLoadReport load_hf(const std::filesystem::path& folder, ParamStore& store,
                     const HfLoadOptions& options = {});

}  // namespace titanium

// What a family of models gives: blocks over declared weights.  Nothing is allocated until a ParamStore is
// made.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "titanium/config/hf_config.h"
#include "titanium/models/parts.h"

namespace titanium {

struct Model {
  HfConfig config;
  std::unique_ptr<WeightTable> table;
  std::vector<std::unique_ptr<Block>> blocks;  // embedding, layers, head
  const HeadBlock* head = nullptr;             // the last of them, null for a value head
  RopeTable rope;

  int block_count() const { return static_cast<int>(blocks.size()); }
  int64_t layers() const { return config.num_hidden_layers; }
  // Multiply-adds of a forward times 2, for one document of T tokens: matrices and causal attention.
  double forward_flops(int64_t T) const;
};

enum class ModelHead {
  kLanguageModel,
  kValue,  // one number a position: score.weight [1, D], score.bias [1]
};

// A name in the registry, and how to build it.
struct ModelSpec {
  ModelName name;
  HfConfig config;
  std::function<Model(const HfConfig&, const Tp&)> make;
  Model build(const HfConfig& c, const Tp& tp = {}) const { return make(c, tp); }
};

// The spec of a checkpoint's config.json.  BadConfig lists the families that are known.
ModelSpec model_registry(const HfConfig& config, ModelHead head = ModelHead::kLanguageModel);

// A decoder of pre-norm layers, each attention then MLP: the shape that llama, mistral, qwen2 and qwen3
// share.  What differs between them are flags of HfConfig, read from config.json.  BadConfig when there are
// more tensor-parallel ranks than query heads.
Model dense_decoder(const HfConfig& config, ModelHead head = ModelHead::kLanguageModel, const Tp& tp = {});

// How a batch is put to the blocks.
enum class HeadRows { kAll, kLabelled, kWeighted };  // positions for which the head computes anything
BlockInput block_input(const Model& model, const PackedBatch& batch, at::ScalarType compute, HeadRows rows);

}  // namespace titanium

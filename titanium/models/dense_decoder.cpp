#include <ATen/ATen.h>

#include "titanium/models/model.h"

namespace titanium {
namespace {

class DecoderLayer final : public Block {
 public:
  DecoderLayer(AttentionPart attention, MlpPart mlp)
      : attention_(std::move(attention)), mlp_(std::move(mlp)) {}
  at::Tensor forward(const at::Tensor& x, const BlockInput& in, BlockOutput&) const override {
    return mlp_.forward(attention_.forward(x, in), in);
  }
  Bytes bytes(int64_t T, int64_t element, bool keep_cheap) const override {
    const Bytes a = attention_.bytes(T, element, keep_cheap), m = mlp_.bytes(T, element, keep_cheap);
    return {a.saved + m.saved, std::max(a.forward_work, m.forward_work),
            std::max(a.backward_work, m.backward_work)};
  }
  Cost cost(int64_t T, int64_t L, int64_t element) const override {
    const Cost a = attention_.cost(T, L, element), m = mlp_.cost(T, L, element);
    return {a.matmul + m.matmul,
            a.attention,
            0,
            a.tp_bytes + m.tp_bytes,
            a.tp_calls + m.tp_calls,
            a.tp_again_bytes + m.tp_again_bytes,
            a.tp_again_calls + m.tp_again_calls};
  }

 private:
  AttentionPart attention_;
  MlpPart mlp_;
};

}  // namespace

Model dense_decoder(const HfConfig& c, ModelHead kind, const Tp& tp) {
  Model model;
  model.config = c;
  model.table = std::make_unique<WeightTable>(tp.rank(), tp.size());
  model.rope = rope_table(c.rope, c.head_dim);
  int block = 0;
  const auto weights = [&](const std::string& prefix) {
    return Weights(*model.table, prefix, block, c.initializer_range);
  };
  auto embed = std::make_unique<EmbedBlock>(c.vocab_size, c.hidden_size, weights("model."), tp);
  const Weight* embedding = embed->weight();
  model.blocks.push_back(std::move(embed));
  for (int64_t layer = 0; layer < c.num_hidden_layers; ++layer) {
    ++block;
    const Weights w = weights(fmt::format("model.layers.{}.", layer));
    const AttentionShape shape{.D = c.hidden_size,
                               .N = c.num_attention_heads,
                               .K = c.num_key_value_heads,
                               .H = c.head_dim,
                               .window = c.window.at(layer),
                               .norm_eps = c.rms_norm_eps,
                               .qkv_bias = c.qkv_bias,
                               .o_bias = c.o_bias,
                               .qk_norm = c.qk_norm,
                               .layer = layer};
    AttentionPart attention(shape, w, tp);  // weights are declared in this order
    MlpPart mlp(c.hidden_size, c.intermediate_size, c.rms_norm_eps, c.mlp_bias, w, tp);
    model.blocks.push_back(std::make_unique<DecoderLayer>(std::move(attention), std::move(mlp)));
  }
  ++block;
  if (kind == ModelHead::kValue) {
    model.blocks.push_back(
        std::make_unique<ValueHeadBlock>(c.hidden_size, c.rms_norm_eps, weights("model."), weights(""), tp));
    return model;
  }
  auto head = std::make_unique<HeadBlock>(c.vocab_size, c.hidden_size, c.rms_norm_eps,
                                          c.tie_word_embeddings ? embedding : nullptr, weights("model."),
                                          weights(""), tp);
  if (c.tie_word_embeddings) model.table->share(embedding, block);
  model.head = head.get();
  model.blocks.push_back(std::move(head));
  return model;
}

double Model::forward_flops(int64_t T) const {
  const auto& c = config;
  const double t = static_cast<double>(T);
  const double qkv_o =
      2.0 * c.hidden_size * c.head_dim * (2 * c.num_attention_heads + 2 * c.num_key_value_heads);
  const double mlp = 2.0 * 3 * c.hidden_size * c.intermediate_size;
  double attention = 0;
  for (int64_t window : c.window) {
    const double w = window > 0 ? std::min<double>(static_cast<double>(window), t) : t;
    attention += 4.0 * c.num_attention_heads * c.head_dim * (w * (w + 1) / 2 + (t - w) * w);
  }
  const double outputs = head ? static_cast<double>(c.vocab_size) : 1;
  return t * (c.num_hidden_layers * (qkv_o + mlp) + 2.0 * c.hidden_size * outputs) + attention;
}

BlockInput block_input(const Model& model, const PackedBatch& batch, at::ScalarType compute, HeadRows rows) {
  const at::ScalarType stats = compute == at::kDouble ? at::kDouble : at::kFloat;
  const auto ids = [](const std::vector<int64_t>& values) {
    return at::tensor(at::ArrayRef<int64_t>(values), at::kLong);
  };
  BlockInput in;
  in.tokens = ids(batch.tokens);
  in.bounds = batch.bounds;
  in.angles = rope_angles(ids(batch.positions), model.rope.inv_freq, model.rope.attention_factor, stats);
  in.labels = ids(batch.labels);
  if (!batch.temperature.empty()) {
    in.temperature = at::tensor(at::ArrayRef<double>(batch.temperature), at::kDouble).to(stats);
  }
  if (rows != HeadRows::kAll) {
    std::vector<int64_t> chosen;
    for (int64_t t = 0; t < batch.size(); ++t) {
      if (rows == HeadRows::kLabelled ? batch.labels[t] >= 0 : batch.weight[t] != 0) chosen.push_back(t);
    }
    in.rows = ids(chosen);
  }
  return in;
}

}  // namespace titanium

#include "titanium/models/parts.h"

#include <ATen/ATen.h>

#include "titanium/base/error.h"
#include "titanium/models/kv_cache.h"
#include "titanium/ops/head.h"
#include "titanium/ops/linear.h"
#include "titanium/ops/norm.h"
#include "titanium/ops/products.h"
#include "titanium/ops/swiglu.h"
#include "titanium/ops/value_head.h"
#include "titanium/shard/split.h"

namespace titanium {

const Weight* Weights::matrix(const std::string& name, int64_t out, int64_t in, Split split,
                              std::vector<TpPart> parts) {
  return table_.add(prefix_ + name, {out, in}, split, {Init::kNormal, init_std_}, block_, std::move(parts));
}
const Weight* Weights::norm(const std::string& name, int64_t width) {
  return table_.add(prefix_ + name, {width}, Split::kWhole, {Init::kOnes}, block_);
}
const Weight* Weights::bias(const std::string& name, int64_t width, Split split, std::vector<TpPart> parts) {
  return table_.add(prefix_ + name, {width}, split, {Init::kZeros}, block_, std::move(parts));
}

namespace {

// What comes in when T rows of D are put together from, or given back to, all tensor-parallel ranks.
double from_others(double T, int64_t D, double bytes, const Tp& tp) {
  return T * static_cast<double>(D) * bytes * (tp.size() - 1) / tp.size();
}
// Of a sum over ranks: it stays in fp32 (fp64) until all parts are in.
double sum_bytes(int64_t element) {
  return static_cast<double>(std::max<int64_t>(element, 4));
}

// This rank's part of a sum of T rows over ranks.
int64_t wide_bytes(int64_t T, int64_t D, int64_t element, const Tp& tp) {
  return tp.size() > 1 ? T * D * std::max<int64_t>(element, 4) : 0;
}

// What attention copies into a type that it multiplies: q, k, v and output, `width` numbers together.
int64_t attention_work(int64_t T, int64_t width, int64_t element) {
  const int64_t computes = block_element(element);
  return computes == element ? 0 : T * width * computes;
}

int64_t count(const std::vector<TpPart>& parts, const Tp& tp) {
  return parts[tp.rank()].end - parts[tp.rank()].begin;
}

std::vector<TpPart> split_vocabulary(int64_t V, const Tp& tp) {
  return split_evenly(V, tp.size(), "vocab_size");
}

}  // namespace

AttentionPart::AttentionPart(const AttentionShape& shape, Weights w, const Tp& tp) : s_(shape), tp_(tp) {
  const HeadSplit heads = split_heads(s_.N, s_.K, tp.size());
  n_ = count(heads.queries, tp);
  k_ = count(heads.keys, tp);
  const auto queries = times_width(heads.queries, s_.H), keys = times_width(heads.keys, s_.H);
  norm_ = w.norm("input_layernorm.weight", s_.D);
  const Weight* q = w.matrix("self_attn.q_proj.weight", s_.N * s_.H, s_.D, Split::kRows, queries);
  const Weight* k = w.matrix("self_attn.k_proj.weight", s_.K * s_.H, s_.D, Split::kRows, keys);
  const Weight* v = w.matrix("self_attn.v_proj.weight", s_.K * s_.H, s_.D, Split::kRows, keys);
  qkv_ = w.stack({q, k, v});
  if (s_.qkv_bias) {
    const Weight* q_bias = w.bias("self_attn.q_proj.bias", s_.N * s_.H, Split::kRows, queries);
    const Weight* k_bias = w.bias("self_attn.k_proj.bias", s_.K * s_.H, Split::kRows, keys);
    const Weight* v_bias = w.bias("self_attn.v_proj.bias", s_.K * s_.H, Split::kRows, keys);
    qkv_bias_ = w.stack({q_bias, k_bias, v_bias});
  }
  o_ = w.matrix("self_attn.o_proj.weight", s_.D, s_.N * s_.H, Split::kCols, queries);
  if (s_.o_bias) o_bias_ = w.bias("self_attn.o_proj.bias", s_.D, Split::kWhole);
  if (s_.qk_norm) {
    q_norm_ = w.norm("self_attn.q_norm.weight", s_.H);
    k_norm_ = w.norm("self_attn.k_norm.weight", s_.H);
  }
}

at::Tensor AttentionPart::forward(const at::Tensor& x, const BlockInput& in) const {
  const at::Tensor qkv =
      norm_linear(x, *norm_, s_.norm_eps, *qkv_, qkv_bias_, tp_.rows(), in.keep_cheap);  // [T, (n+2k) H]
  const auto [q, k, v] = split_rope(qkv, n_, k_, s_.H, in.angles, q_norm_, k_norm_, s_.norm_eps);
  return linear(attend(q, k, v, in).flatten(1), *o_, o_bias_, /*residual=*/x, tp_.rows());
}

at::Tensor AttentionPart::attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                 const BlockInput& in) const {
  if (!in.cache) return attention(q, k, v, {in.bounds, in.bounds, {}, s_.window});
  const KvCache::View all = in.cache->append(s_.layer, in.slots, in.bounds, k, v);
  return attention(q, all.k, all.v, {in.bounds, all.bounds, all.starts, s_.window});
}

Block::Bytes AttentionPart::bytes(int64_t T, int64_t element, bool keep_cheap) const {
  const int64_t qkv = (n_ + 2 * k_) * s_.H, a = n_ * s_.H, t = T / tp_.size();
  // The input and its row statistics, q k v after rope, the attention's output and its log-sum-exp.
  int64_t saved = t * (s_.D * element + 4) + T * ((qkv + a) * element + 4 * n_);
  if (s_.qk_norm) saved += T * qkv * element;  // the norms go backward from the plain q and k
  if (keep_cheap) saved += T * s_.D * element;
  const LinearWork in = linear_work(T, qkv, s_.D, element), out = linear_work(T, s_.D, a, element);
  const int64_t attend = attention_work(T, qkv + a, element), wide = wide_bytes(T, s_.D, element, tp_);
  // The normalised input and q k v before rope; the output.  Going back also the gradients of all of them.
  const int64_t forward = std::max({T * (s_.D + qkv) * element + in.forward, T * qkv * element + attend,
                                    T * s_.D * element + out.forward + wide});
  const int64_t backward =
      std::max({T * (2 * s_.D + qkv) * element + in.backward + wide, T * (qkv + 2 * a) * element + 2 * attend,
                T * (s_.D + a) * element + out.backward});
  return {saved, forward, backward};
}

Block::Cost AttentionPart::cost(int64_t T, int64_t L, int64_t element) const {
  const double t = static_cast<double>(T), l = static_cast<double>(std::min(L, T));
  const double w = s_.window > 0 ? std::min(static_cast<double>(s_.window), l) : l;
  const double seen = (w * (w + 1) / 2 + (l - w) * w) / l;  // keys of a query, on average
  Block::Cost cost;
  cost.matmul = 2.0 * t * s_.D * s_.H * (2 * n_ + 2 * k_);
  cost.attention = 4.0 * t * seen * n_ * s_.H;
  cost.tp_again_bytes = from_others(t, s_.D, element, tp_);
  cost.tp_again_calls = tp_.size() > 1 ? 1 : 0;
  cost.tp_bytes = from_others(t, s_.D, element, tp_) + from_others(t, s_.D, sum_bytes(element), tp_);
  cost.tp_calls = tp_.size() > 1 ? 2 : 0;
  return cost;
}

MlpPart::MlpPart(int64_t D, int64_t F, double norm_eps, bool bias, Weights w, const Tp& tp)
    : tp_(tp), D_(D), eps_(norm_eps) {
  const std::vector<TpPart> parts = split_evenly(F, tp.size(), "intermediate_size");
  f_ = count(parts, tp);
  norm_ = w.norm("post_attention_layernorm.weight", D);
  const Weight* gate = w.matrix("mlp.gate_proj.weight", F, D, Split::kRows, parts);
  const Weight* up = w.matrix("mlp.up_proj.weight", F, D, Split::kRows, parts);
  gate_up_ = w.stack({gate, up});
  if (bias) {
    const Weight* gate_bias = w.bias("mlp.gate_proj.bias", F, Split::kRows, parts);
    const Weight* up_bias = w.bias("mlp.up_proj.bias", F, Split::kRows, parts);
    gate_up_bias_ = w.stack({gate_bias, up_bias});
  }
  down_ = w.matrix("mlp.down_proj.weight", D, F, Split::kCols, parts);
  if (bias) down_bias_ = w.bias("mlp.down_proj.bias", D, Split::kWhole);
}

at::Tensor MlpPart::forward(const at::Tensor& x, const BlockInput& in) const {
  const at::Tensor gate_up =
      norm_linear(x, *norm_, eps_, *gate_up_, gate_up_bias_, tp_.rows(), in.keep_cheap);  // [T, 2f]
  return in.keep_cheap ? linear(swiglu(gate_up), *down_, down_bias_, /*residual=*/x, tp_.rows())
                       : swiglu_linear(gate_up, *down_, down_bias_, /*residual=*/x, tp_.rows());
}

Block::Bytes MlpPart::bytes(int64_t T, int64_t element, bool keep_cheap) const {
  // The input, its statistics, gate and up.
  int64_t saved = T / tp_.size() * (D_ * element + 4) + T * 2 * f_ * element;
  if (keep_cheap) saved += T * (D_ + f_) * element;  // the normalised input, silu(gate) * up
  const LinearWork in = linear_work(T, 2 * f_, D_, element), out = linear_work(T, D_, f_, element);
  const int64_t wide = wide_bytes(T, D_, element, tp_);
  // The normalised input; silu(gate) * up and the output.  Going back also the gradients of all of them.
  const int64_t forward =
      std::max(T * D_ * element + in.forward, T * (f_ + D_) * element + out.forward + wide);
  const int64_t backward = std::max(T * (2 * D_ + 2 * f_) * element + in.backward + wide,
                                    T * (2 * f_ + D_) * element + out.backward);
  return {saved, forward, backward};
}

Block::Cost MlpPart::cost(int64_t T, int64_t, int64_t element) const {
  const double t = static_cast<double>(T);
  Block::Cost cost;
  cost.matmul = 2.0 * t * D_ * 3 * f_;
  cost.tp_again_bytes = from_others(t, D_, element, tp_);
  cost.tp_again_calls = tp_.size() > 1 ? 1 : 0;
  cost.tp_bytes = from_others(t, D_, element, tp_) + from_others(t, D_, sum_bytes(element), tp_);
  cost.tp_calls = tp_.size() > 1 ? 2 : 0;
  return cost;
}

EmbedBlock::EmbedBlock(int64_t V, int64_t D, Weights w, const Tp& tp) : tp_(tp), D_(D) {
  const std::vector<TpPart> parts = split_vocabulary(V, tp);
  slice_ = tp.vocabulary(parts);
  weight_ = w.matrix("embed_tokens.weight", V, D, Split::kRows, parts);
}

at::Tensor EmbedBlock::forward(const at::Tensor& x, const BlockInput& in, BlockOutput&) const {
  if (in.cache && tp_.size() > 1) {
    throw BadConfig("generating text needs parallelism.tensor_parallel_degree 1; given {}", tp_.size());
  }
  return scatter_rows(embedding(in.tokens, *weight_, /*anchor=*/x, slice_.get()), tp_);  // [t, D]
}

Block::Bytes EmbedBlock::bytes(int64_t T, int64_t element, bool) const {
  return {T * 8, T * D_ * element, T * D_ * element};
}

Block::Cost EmbedBlock::cost(int64_t T, int64_t, int64_t element) const {
  return {0, 0, 0, from_others(static_cast<double>(T), D_, element, tp_), tp_.size() > 1 ? 1 : 0, 0, 0};
}

HeadBlock::HeadBlock(int64_t V, int64_t D, double norm_eps, const Weight* tied, Weights norm, Weights head,
                     const Tp& tp)
    : tp_(tp), D_(D), eps_(norm_eps), norm_(norm.norm("norm.weight", D)) {
  const std::vector<TpPart> parts = split_vocabulary(V, tp);
  v_ = count(parts, tp);
  slice_ = tp.vocabulary(parts);
  weight_ = tied ? tied : head.matrix("lm_head.weight", V, D, Split::kRows, parts);
}

at::Tensor HeadBlock::forward(const at::Tensor& x, const BlockInput& in, BlockOutput& out) const {
  const at::Tensor h = rms_norm(x, *norm_, eps_);  // [t, D]
  if (in.nll_weight.defined()) {
    auto [loss, logprob] =
        weighted_nll(h, *weight_, in.labels, in.nll_weight, in.temperature, in.rows, slice_.get());
    out.loss = loss;
    out.stats.logprob = logprob;
  } else {
    out.stats = linear_logprob(h, *weight_, in.labels, in.temperature, in.rows, in.wants, slice_.get());
  }
  return {};
}

Block::Bytes HeadBlock::bytes(int64_t T, int64_t element, bool) const {
  // The normalised rows and their gradient.  The forward forms it, so the backward has the norm's alone.
  return {T * (2 * D_ * element + 16), head_nll_work(T, D_, v_, element), T * D_ * element};
}

Block::Cost HeadBlock::cost(int64_t T, int64_t, int64_t element) const {
  const double t = static_cast<double>(T);
  return {0, 0, 2.0 * t * D_ * v_, from_others(t, D_, element, tp_), tp_.size() > 1 ? 2 : 0, 0, 0};
}

at::Tensor HeadBlock::logits(const at::Tensor& x) const {
  return titanium::logits(rms_norm(x, *norm_, eps_), *weight_, slice_.get());
}

ValueHeadBlock::ValueHeadBlock(int64_t D, double norm_eps, Weights norm, Weights head, const Tp& tp)
    : tp_(tp), D_(D), eps_(norm_eps), norm_(norm.norm("norm.weight", D)) {
  score_ = head.matrix("score.weight", 1, D, Split::kWhole);
  bias_ = head.bias("score.bias", 1, Split::kWhole);
}

at::Tensor ValueHeadBlock::forward(const at::Tensor& x, const BlockInput& in, BlockOutput& out) const {
  const at::Tensor h = rms_norm(x, *norm_, eps_);  // [t, D]
  if (!in.rows.defined()) {
    out.stats.value = gather_values(value_head(h, *score_, *bias_), tp_);  // [T]
    return {};
  }
  at::Tensor rows = in.rows;  // those of this rank
  if (tp_.size() > 1) {
    rows = rows - tp_.rank() * x.size(0);
    rows = rows.index({(rows >= 0) & (rows < x.size(0))});
  }
  const at::Tensor value = value_head(h.index_select(0, rows), *score_, *bias_);  // [R]
  const at::Tensor mine = at::zeros({x.size(0)}, value.options()).index_copy(0, rows, value);
  out.stats.value = gather_values(mine, tp_);
  return {};
}

Block::Cost ValueHeadBlock::cost(int64_t T, int64_t, int64_t) const {
  const double t = static_cast<double>(T);
  return {0, 0, 2.0 * t / tp_.size() * D_, from_others(t, 1, 4, tp_), tp_.size() > 1 ? 1 : 0, 0, 0};
}

Block::Bytes ValueHeadBlock::bytes(int64_t T, int64_t element, bool) const {
  const int64_t t = T / tp_.size();
  return {t * (2 * D_ * element + 16), t * D_ * 4, t * D_ * 4};
}

}  // namespace titanium

// Rotary embedding and packed causal attention.
// T tokens, N query heads, K key heads (K divides N), H head width, D documents.
#pragma once
#include <tuple>
#include <vector>

#include "titanium/ops/handle.h"

namespace titanium {

// Cosine and sine of every position's angles, already times the attention factor: [T, H/2] fp32 (fp64 in an
// fp64 run).
struct RopeAngles {
  at::Tensor cos, sin;
};

// positions [T] int64, inv_freq [H/2] fp64.  Angles are formed in fp64, so that position 100000 is as exact
// as position 1.
RopeAngles rope_angles(const at::Tensor& positions, const std::vector<double>& inv_freq,
                       double attention_factor, at::ScalarType dtype);

// Splits qkv [T, (N + 2K) H] into q [T, N, H], k [T, K, H], v [T, K, H], with rms-norm over H of every q and
// k head first where q_norm and k_norm [H] are given (qwen3), then half-split rope on q and k: (x1, x2) ->
// (x1 cos - x2 sin, x2 cos + x1 sin), x1 and x2 the halves of a head.  One op with one backward into one [T,
// (N + 2K) H] gradient.
std::tuple<at::Tensor, at::Tensor, at::Tensor> split_rope(const at::Tensor& qkv, int64_t N, int64_t K,
                                                          int64_t H, const RopeAngles& angles,
                                                          const Handle* q_norm = nullptr,
                                                          const Handle* k_norm = nullptr, double eps = 0);

struct AttentionSpec {
  std::vector<int64_t> q_bounds;  // [D + 1], first query of each document, then T
  std::vector<int64_t> k_bounds;  // [D + 1], the same for keys; the last query of a document sits at its last
                                  // key, so a document may have more keys than queries (a KV cache)
  std::vector<int64_t> k_starts;  // [D], where the keys of each document begin in k and v, which may hold
                                  // more than those (a cache with room to grow); empty: one after another
  int64_t window = 0;             // a query sees the keys with 0 <= q - k < window; 0 = all before it
  double scale = 0;               // 0 = 1 / sqrt(H)
};

// q [Tq, N, H], k and v [Tk, K, H] -> [Tq, N, H].  With k_starts there is no gradient.  Query head n uses key
// head n / (N / K).  No document sees another, and the result of a token does not depend on its neighbours in
// the pack, to the bit.  Nothing of size Tq x Tk is ever held. Softmax in fp32 (fp64 for fp64).
at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     const AttentionSpec& spec);

}  // namespace titanium

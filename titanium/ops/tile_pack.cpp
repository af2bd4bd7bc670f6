#include "titanium/ops/tile_pack.h"

namespace titanium {
namespace {

using Words = BitVector<float>;  // 16 words of 32 bits: fp32, or pairs of bf16

// Exchanges the off-diagonal S x S blocks of a 16 x 16 matrix, in all its 2 S x 2 S blocks.
template <int S>
TITANIUM_INLINE void exchange(Words (&row)[16]) {
  for (int i = 0; i < 16; ++i)
    if ((i & S) == 0) {
      const Words a = row[i], b = row[i + S];
      if constexpr (S == 8) {
        row[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
        row[i + S] =
            __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
      } else if constexpr (S == 4) {
        row[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27);
        row[i + S] =
            __builtin_shufflevector(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
      } else if constexpr (S == 2) {
        row[i] = __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
        row[i + S] =
            __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
      } else {
        row[i] = __builtin_shufflevector(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30);
        row[i + S] = __builtin_shufflevector(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
      }
    }
}
TITANIUM_INLINE void transpose16(Words (&row)[16]) {
  exchange<8>(row);
  exchange<4>(row);
  exchange<2>(row);
  exchange<1>(row);
}

template <typename T>
TITANIUM_INLINE void load16(const T* const* rows, int at, Words (&block)[16]) {
  for (int i = 0; i < 16; ++i) std::memcpy(&block[i], rows[i] + at, sizeof(Words));
}

// Asks for the rows after the next 16: rows far apart lie in pages of their own, which no prefetcher
// foresees.
template <typename T>
TITANIUM_INLINE void prefetch16(const T* const* rows, int left, int H) {
  for (int i = 16; i < 32 && i < left; ++i)
    for (int h = 0; h < H; h += 64 / sizeof(T)) __builtin_prefetch(rows[i] + h);
}

// words [width][n] -> [n][width] for 32-bit words that T numbers make up.
template <typename T>
TITANIUM_INLINE void transpose_words(int width, int H, const T* const* rows, T* to) {
  constexpr int kPerWord = 4 / sizeof(T);
  Words block[16];
  for (int h = 0; h < H; h += 16 * kPerWord)
    for (int c = 0; c < width; c += 16) {
      load16(rows + c, h, block);
      transpose16(block);
      for (int i = 0; i < 16; ++i)
        std::memcpy(to + ((h / kPerWord + i) * width + c) * kPerWord, &block[i], sizeof(Words));
    }
}

}  // namespace

TITANIUM_CLONES void pack_columns(int width, int H, const at::BFloat16* const* rows, at::BFloat16* right) {
  transpose_words(width, H, rows, right);
}
TITANIUM_CLONES void pack_columns(int width, int H, const float* const* rows, float* right) {
  transpose_words(width, H, rows, right);
}
void pack_columns(int width, int H, const double* const* rows, double* right) {
  for (int c = 0; c < width; ++c)
    for (int h = 0; h < H; ++h) right[h * width + c] = rows[c][h];
}

TITANIUM_CLONES void pack_rows(int width, int H, const at::BFloat16* const* rows, at::BFloat16* right) {
  for (int i = 0; i < width; i += 2)
    for (int h = 0; h < H; h += 16) {
      const Words pair = (bits_of(load_wide(rows[i] + h)) >> 16) | bits_of(load_wide(rows[i + 1] + h));
      std::memcpy(right + i * H + h * 2, &pair, sizeof pair);
    }
}
void pack_rows(int width, int H, const float* const* rows, float* right) {
  for (int i = 0; i < width; ++i) std::memcpy(right + i * H, rows[i], sizeof(float) * H);
}
void pack_rows(int width, int H, const double* const* rows, double* right) {
  for (int i = 0; i < width; ++i) std::memcpy(right + i * H, rows[i], sizeof(double) * H);
}

TITANIUM_CLONES void pack_transposed(int width, int H, const at::BFloat16* const* rows, at::BFloat16* left) {
  Words block[16];
  for (int c = 0; c < width; c += 16) {
    prefetch16(rows + c, width - c, H);
    for (int h = 0; h < H; h += 32) {
      load16(rows + c, h, block);
      transpose16(block);
      for (int i = 0; i < 16; ++i) {
        const auto even = __builtin_convertvector(block[i], VectorOf<float>::Half);
        const auto odd = __builtin_convertvector(block[i] >> 16, VectorOf<float>::Half);
        std::memcpy(left + (h + 2 * i) * width + c, &even, sizeof even);
        std::memcpy(left + (h + 2 * i + 1) * width + c, &odd, sizeof odd);
      }
    }
  }
}
void pack_transposed(int width, int H, const float* const* rows, float* left) {
  pack_columns(width, H, rows, left);
}
void pack_transposed(int width, int H, const double* const* rows, double* left) {
  pack_columns(width, H, rows, left);
}

namespace {

template <typename T>
TITANIUM_INLINE void unpack_words(int count, int width, int H, const float* columns, const float* factor,
                                  T* const* rows) {
  Words block[16];
  for (int c = 0; c < count; c += 16)
    for (int h = 0; h < H; h += 16) {
      for (int i = 0; i < 16; ++i) block[i] = bits_of(load(columns + (h + i) * width + c) * load(factor + c));
      transpose16(block);
      const int n = count - c < 16 ? count - c : 16;
      for (int i = 0; i < n; ++i) store_narrow(rows[c + i] + h, from_bits(block[i]));
    }
}

}  // namespace

TITANIUM_CLONES void unpack_columns(int count, int width, int H, const float* columns, const float* factor,
                                    at::BFloat16* const* rows) {
  unpack_words(count, width, H, columns, factor, rows);
}
TITANIUM_CLONES void unpack_columns(int count, int width, int H, const float* columns, const float* factor,
                                    float* const* rows) {
  unpack_words(count, width, H, columns, factor, rows);
}
void unpack_columns(int count, int width, int H, const double* columns, const double* factor,
                    double* const* rows) {
  for (int c = 0; c < count; ++c)
    for (int h = 0; h < H; ++h) rows[c][h] = columns[h * width + c] * factor[c];
}

}  // namespace titanium

// A part of a weight, whoever holds it: a rank's slice, or what a checkpoint's file has of it.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "titanium/base/error.h"
#include "titanium/shard/param_store.h"

namespace titanium {

// Elements [begin, end), counted row-major in the columns [column_begin, column_end) of a matrix whose rows
// have `width` elements.  Where that is all columns, they are counted in the weight itself.
struct Piece {
  int64_t width = 1, column_begin = 0, column_end = 1;
  int64_t begin = 0, end = 0;

  int64_t columns() const { return column_end - column_begin; }
  bool all_columns() const { return columns() == width; }
  int64_t count() const { return end - begin; }
};

inline Piece piece_of(const Slice& slice) {
  const Weight& weight = *slice.weight;
  const int64_t rows = weight.shape().empty() ? 1 : weight.shape()[0];
  const int64_t width = std::max<int64_t>(1, rows == 0 ? 1 : weight.numel() / rows);
  if (weight.split() == Split::kWhole) return {width, 0, width, slice.begin, slice.end};
  const TpPart& part = weight.parts()[slice.tp];
  if (weight.split() == Split::kCols) return {width, part.begin, part.end, slice.begin, slice.end};
  return {width, 0, width, part.begin * width + slice.begin, part.begin * width + slice.end};
}

// The slice in parts of at most `count` elements, e.g. one for each thread.
inline std::vector<Slice> parts_of(const Slice& slice, int64_t count) {
  std::vector<Slice> parts;
  for (int64_t at = slice.begin; at < slice.end; at += count) {
    Slice& part = parts.emplace_back(slice);
    part.begin = at;
    part.end = std::min(at + count, slice.end);
    part.offset = slice.offset + at - slice.begin;
  }
  return parts;
}

// What two pieces of one weight have in common, as runs that lie together in both: visit(a, b, count) for
// elements [a, a + count) of the first and [b, b + count) of the second, counted from their begins.
template <typename Visit>
void each_overlap(const Piece& a, const Piece& b, Visit visit) {
  if (a.width != b.width) throw Bug("pieces of weights with rows of {} and {}", a.width, b.width);
  if (a.column_begin == b.column_begin && a.column_end == b.column_end) {
    const int64_t begin = std::max(a.begin, b.begin), end = std::min(a.end, b.end);
    if (begin < end) visit(begin - a.begin, begin - b.begin, end - begin);
    return;
  }
  const int64_t column_begin = std::max(a.column_begin, b.column_begin);
  const int64_t column_end = std::min(a.column_end, b.column_end);
  if (column_begin >= column_end || a.count() <= 0 || b.count() <= 0) return;
  const int64_t first = std::max(a.begin / a.columns(), b.begin / b.columns());
  const int64_t last = std::min((a.end - 1) / a.columns(), (b.end - 1) / b.columns());
  for (int64_t row = first; row <= last; ++row) {
    // Where column 0 of this row would be, counted from each begin.
    const int64_t in_a = row * a.columns() - a.column_begin - a.begin;
    const int64_t in_b = row * b.columns() - b.column_begin - b.begin;
    const int64_t begin = std::max({column_begin, -in_a, -in_b});
    const int64_t end = std::min({column_end, a.count() - in_a, b.count() - in_b});
    if (begin < end) visit(in_a + begin, in_b + begin, end - begin);
  }
}

}  // namespace titanium

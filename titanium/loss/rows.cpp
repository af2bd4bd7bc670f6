#include "titanium/loss/rows.h"

namespace titanium {

int64_t Rows::trained(int64_t document) const {
  int64_t n = 0;
  each(document, [&](size_t) { ++n; });
  return n;
}

int64_t Rows::trained() const {
  int64_t n = 0;
  each([&](size_t) { ++n; });
  return n;
}

}  // namespace titanium

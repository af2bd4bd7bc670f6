// Checks that the estimators share.
#pragma once
#include "titanium/loss/advantage.h"

namespace titanium {

void check_rows(const RewardRows& rows, bool grouped);
void check_shape(const RewardRows& rows, const Matrix& values, const char* what);

}  // namespace titanium

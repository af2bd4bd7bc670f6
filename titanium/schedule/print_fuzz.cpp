// Any bytes parse to a plan or are refused; a plan prints and parses to itself; no plan upsets the checker.
#include <cstdint>
#include <cstdlib>

#include "titanium/base/error.h"
#include "titanium/schedule/check.h"
#include "titanium/schedule/memory.h"
#include "titanium/schedule/print.h"

using namespace titanium;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Plan plan;
  try {
    plan = parse_plan({reinterpret_cast<const char*>(data), size});
  } catch (const BadData&) {
    return 0;
  }
  if (parse_plan(print_plan(plan)) != plan || parse_plan(print_plan(plan, 0)) != plan) std::abort();
  static const PlanTask task{
      .part = ModelPart::whole({{{0}, false}, {{1, 2}, true}, {{0}, false}}, {{true}, {true}, {false}}),
      .micro_batches = 2};
  try {
    check(plan, task);
  } catch (const Bug&) {
    return 0;
  }
  simulate_memory(plan, task, {{{1, 2, 3, 4}, {1, 2, 3, 4}, {1, 2, 3, 4}}, {{1, 2}, {1, 2}, {1, 2}}});
  return 0;
}

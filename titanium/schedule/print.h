// The text form of a plan:
//   > unshard 0 | . unshard 0 | forward 0 drop | reshard 0 | ...
// `>` starts and `.` waits.  `@2` names the micro-batch, shown when the plan has more than one.
#pragma once
#include <string>
#include <string_view>

#include "titanium/schedule/action.h"

namespace titanium {

// A line a phase (forward and loss, backward, what is waited for at the end), wrapped at `columns` with the
// rest indented.  parse_plan(print_plan(plan)) == plan.
std::string print_plan(const Plan& plan, int columns = 110);

// Reads the text form.  Items are parted by `|` or line ends, `#` starts a comment, `@0` may be left out.
// BadData names the line and the item.
Plan parse_plan(std::string_view text);

}  // namespace titanium

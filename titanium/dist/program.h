// What this process runs, so that ranks can compare.
#pragma once
#include <string>

namespace titanium {

// The build id of the program, and a line with name and build id for each library of libtorch that it has
// loaded.
std::string program_identity();

}  // namespace titanium

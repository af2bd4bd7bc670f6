// Small file helpers of this room.
#pragma once
#include <filesystem>
#include <string_view>

namespace titanium {

// Makes the folder and those above it.  BadConfig with the path and the system's reason.
void make_folder(const std::filesystem::path& folder);

// All of the bytes at the end of the file, or none: where the disk takes only a part, that part is cut off
// again and the answer is false.
bool append_whole(int fd, std::string_view bytes);

}  // namespace titanium

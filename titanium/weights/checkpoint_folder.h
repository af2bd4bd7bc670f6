// The folder of checkpoints: which are complete, putting a new one in place, and taking old ones away.  A
// name changes or a folder goes only in steps after each of which the newest complete checkpoint can still be
// found.
#pragma once
#include <cstdint>
#include <filesystem>

namespace titanium {

// All throw BadCheckpoint with path and the system's reason.
void make_checkpoint_folder(const std::filesystem::path& folder);

// What killed saves left behind: `step-<n>.partial` goes; `step-<n>.replaced` goes when step-<n> is complete,
// else gets its name back.
void clean_wrecks(const std::filesystem::path& folder);

// `step-<n>.partial`, complete and on disk, becomes `step-<n>`; one of that name is replaced.
void put_in_place(const std::filesystem::path& partial);

// Removes complete checkpoints until k are left (0: all stay), lowest step first, never that of `newest`.
void keep_latest(const std::filesystem::path& folder, int64_t k, int64_t newest);

}  // namespace titanium

// A checkpoint into a store, for any layout of the ranks that saved it.
#pragma once
#include <filesystem>

#include "titanium/weights/checkpoint.h"

namespace titanium {

// optimizer null: masters only, whatever else is saved.  BadCheckpoint as Checkpointer::load says.
LoadedCheckpoint load_checkpoint(const std::filesystem::path& folder, ParamStore& store,
                                 Optimizer* optimizer);

}  // namespace titanium

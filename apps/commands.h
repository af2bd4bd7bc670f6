// The subcommands of `titanium`.  Each adds itself to the parser and sets `run` when it is the one chosen.
#pragma once
#include <CLI/CLI.hpp>
#include <functional>
#include <string>
#include <vector>

#include "titanium/config/train_config.h"

namespace titanium {

using Run = std::function<int()>;  // returns the exit status

constexpr int64_t kMostCount = 1'000'000'000;  // of tokens, ids and micro-batches that a flag may ask for

void add_train(CLI::App& app, Run& run);
void add_score(CLI::App& app, Run& run);
void add_generate(CLI::App& app, Run& run);
void add_convert(CLI::App& app, Run& run);
void add_check(CLI::App& app, Run& run);
void add_plan(CLI::App& app, Run& run);
void add_info(CLI::App& app, Run& run);
void add_serve(CLI::App& app, Run& run);
void add_launch(CLI::App& app, Run& run);

// A config for commands that have flags instead of a file: fp32 unless `dtype` ("float32", "bfloat16",
// "float64") says otherwise, then overrides.
TrainConfig command_config(const std::string& dtype, const std::vector<std::string>& overrides);

// Checks of flags, with words for the error.
CLI::Validator not_empty();
CLI::Validator whole_number();  // 0 to 2^64 - 1

}  // namespace titanium

#include <fmt/format.h>

#include <iostream>

#include "apps/commands.h"
#include "apps/on_ranks.h"
#include "titanium/train/check.h"

namespace titanium {

void add_check(CLI::App& app, Run& run) {
  struct Flags {
    std::string folder, dtype = "float32";
    bool all = false;
  };
  auto flags = std::make_shared<Flags>();
  CLI::App* command =
      app.add_subcommand("check", "compare this build with the reference values in a model's folder");
  command
      ->add_option("dir", flags->folder,
                   "a folder with config.json, weights, expected.safetensors and meta.json")
      ->required()
      ->check(not_empty());
  command->add_option("--dtype", flags->dtype, "compute dtype; float64 compares at 1e-9")
      ->check(CLI::IsMember({"float32", "float64", "bfloat16"}))
      ->capture_default_str();
  command->allow_extras();
  command->footer(
      "Further keys of `titanium train` are taken too, e.g. --activation_checkpoint.mode=full or "
      "--training.max_tokens_per_microbatch=20.");
  command->callback([flags, command, &run] {
    run = [flags, command] {
      const TrainConfig config = command_config(flags->dtype, command->remaining());
      return on_ranks(config.comm, [&](const std::shared_ptr<World>& world) {
        Log log(log_of(*world, LogLevel::kWarning));
        const auto lines = check_model(flags->folder, config, log, world);
        int64_t bad = 0;
        for (const CheckLine& line : lines) {
          if (world->rank() == 0)
            fmt::print("{} {:<55} {:10.3e}   allowed {:.1e}\n", line.ok() ? "ok  " : "FAIL", line.quantity,
                       line.difference, line.tolerance);
          bad += !line.ok();
        }
        if (world->rank() == 0)
          fmt::print("{}: {} quantities, {} outside their tolerance\n", flags->folder, lines.size(), bad);
        return bad == 0 ? 0 : 1;
      });
    };
  });
}

}  // namespace titanium

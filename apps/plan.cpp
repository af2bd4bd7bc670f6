#include <fmt/format.h>

#include <iostream>

#include "apps/commands.h"
#include "titanium/report/format.h"
#include "titanium/schedule/print.h"
#include "titanium/train/estimate.h"
#include "titanium/train/trainer.h"

namespace titanium {

void add_plan(CLI::App& app, Run& run) {
  struct Flags {
    std::string file;
    int32_t micro_batches = 1;
  };
  auto flags = std::make_shared<Flags>();
  CLI::App* command =
      app.add_subcommand("plan", "print what a step of a run does, and what it holds in memory");
  command->add_option("run.toml", flags->file, "the run; of the model only config.json is read")->required();
  command->add_option("--micro-batches", flags->micro_batches, "micro-batches of the step")
      ->check(CLI::Range(1, 10000))
      ->capture_default_str();
  command->allow_extras();
  command->footer("--section.key=value sets a key, after the file.");
  command->callback([flags, command, &run] {
    run = [flags, command] {
      const TrainConfig config = load_train_config(flags->file, command->remaining());
      check_model(config);
      LogOptions options;
      options.level = LogLevel::kWarning;
      Log log(options);
      Session session = open_session(config.model.path, config, log, /*load_weights=*/false);
      const auto optimizer = make_optimizer(*session.store, optimizer_options(config.optimizer));
      fmt::print("# {} {}: {} parameters, {} blocks, {} units; micro-batches of up to {} tokens\n",
                 session.spec.name.name, session.spec.name.flavor,
                 human_number(static_cast<double>(session.store->parameters())), session.model->block_count(),
                 session.store->units().size(), config.training.max_tokens_per_microbatch);
      fmt::print(
          "# memory: {}\n",
          estimate_memory(*session.step, *optimizer, config.training.max_tokens_per_microbatch).text());
      std::cout << print_plan(session.step->plan(flags->micro_batches, false)) << std::endl;
      return 0;
    };
  });
}

}  // namespace titanium

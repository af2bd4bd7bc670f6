#include <algorithm>
#include <iostream>
#include <utility>

#include "apps/commands.h"
#include "titanium/base/error.h"

namespace titanium {
namespace {

int run_main(int argc, char** argv) {
  CLI::App app("titanium: trains large language models from Hugging Face checkpoints");
  app.require_subcommand(1);
  Run run;
  add_train(app, run);
  add_score(app, run);
  add_generate(app, run);
  add_convert(app, run);
  add_check(app, run);
  add_plan(app, run);
  add_info(app, run);
  const std::vector<const CLI::App*> commands = std::as_const(app).get_subcommands({});
  if (argc > 1 && argv[1][0] != '-' && std::none_of(commands.begin(), commands.end(), [&](const CLI::App* c) {
        return c->get_name() == argv[1];
      })) {
    std::string known;
    for (const CLI::App* command : commands) known += (known.empty() ? "" : ", ") + command->get_name();
    std::cerr << "titanium: BadConfig: unknown command '" << argv[1] << "'; known: " << known << std::endl;
    return exit_code(ErrorKind::kBadConfig);
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& e) {  // --help
    return app.exit(e);
  } catch (const CLI::ParseError& e) {
    app.exit(e);
    return exit_code(ErrorKind::kBadConfig);
  }
  try {
    return run();
  } catch (const Error& e) {
    std::cerr << "titanium: " << name(e.kind()) << ": " << e.what() << std::endl;
    return exit_code(e.kind());
  } catch (const c10::Error& e) {
    std::cerr << "titanium: Bug: " << e.what_without_backtrace() << std::endl;
    return exit_code(ErrorKind::kBug);
  } catch (const std::exception& e) {
    std::cerr << "titanium: Bug: " << e.what() << std::endl;
    return exit_code(ErrorKind::kBug);
  }
}

}  // namespace

TrainConfig command_config(const std::string& dtype, const std::vector<std::string>& overrides) {
  std::vector<std::string> all = {"training.mixed_precision_param=" + dtype};
  if (dtype == "float64") {
    all.push_back("training.dtype=float64");
    all.push_back("training.mixed_precision_reduce=float64");
    all.push_back("optimizer.state_dtype=float64");
  }
  all.insert(all.end(), overrides.begin(), overrides.end());
  return load_train_config(std::nullopt, all);
}

}  // namespace titanium

int main(int argc, char** argv) {
  return titanium::run_main(argc, argv);
}

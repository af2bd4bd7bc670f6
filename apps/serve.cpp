#include "titanium/serve/serve.h"

#include <memory>

#include "apps/commands.h"
#include "titanium/dist/open_world.h"
#include "titanium/formats/json.h"

namespace titanium {
namespace {

struct Flags {
  ServeOptions serve;
  std::string config, model_type = "language_model", backend = "titanium", device = "cpu";
};

// As which rank this process speaks.  An environment that makes no sense is for the client to hear of, when
// it asks for an engine.
LogOptions log_options() {
  LogOptions options;
  try {
    const LaunchEnv env = read_launch_env();
    options.rank = env.rank;
    options.world_size = env.size;
    if (env.rank != 0) options.level = LogLevel::kError;
  } catch (const BadConfig&) {
  }
  return options;
}

int run_serve(const Flags& flags) {
  Log log(log_options());
  ServeOptions options = flags.serve;
  if (!flags.config.empty()) {
    options.create = {{"config", read_json(flags.config)},
                      {"model_type", flags.model_type},
                      {"backend", flags.backend},
                      {"device", flags.device}};
  }
  const EngineRegistry registry;
  return serve(options, registry, log, [](const CommConfig& comm) { return open_world(comm); });
}

}  // namespace

void add_serve(CLI::App& app, Run& run) {
  auto flags = std::make_shared<Flags>();
  CLI::App* command = app.add_subcommand("serve", "run an engine for a client in another process");
  CLI::Option* fd = command->add_option(
      "--fd", flags->serve.fd, "serve the client at the other end of this inherited socket, then end");
  CLI::Option* listen =
      command->add_option("--listen", flags->serve.listen,
                          "wait for clients at unix:/path, unix:@name or tcp:127.0.0.1:PORT (0: a free one)");
  fd->check(CLI::NonNegativeNumber)->excludes(listen);
  listen->excludes(fd);
  CLI::Option* config =
      command->add_option("--config", flags->config,
                          "a JSON file {model, engine, optimizer, checkpoint}: make the engine now, "
                          "so that a client may come without one");
  command->add_option("--model-type", flags->model_type, "of that engine: language_model, value_model")
      ->needs(config)
      ->capture_default_str();
  command->add_option("--backend", flags->backend)->needs(config)->capture_default_str();
  command->add_option("--device", flags->device)->needs(config)->capture_default_str();
  command->footer(
      "From Python titanium.spawn(config) starts this command by itself, with --fd, and "
      "titanium.connect(address)\n"
      "speaks to one that listens.  One client at a time: a second one is refused.  When a client closes, a "
      "listening\n"
      "server keeps its engine for the next; when it dies without that, the server ends.  A socket serves "
      "processes of\n"
      "this user only; tcp has no such check, so use it where you trust everyone on this machine.\n"
      "docs/serve.md describes the protocol and the client.");
  command->callback([flags, &run] { run = [flags] { return run_serve(*flags); }; });
}

}  // namespace titanium

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <iostream>
#include <new>
#include <string_view>
#include <system_error>
#include <utility>

#include "apps/commands.h"
#include "titanium/base/error.h"
#include "titanium/base/openmp.h"
#include "titanium/ops/allocator.h"

namespace titanium {
namespace {

// Files that are opened later must not become the standard streams of a process that was started without
// them.
void open_standard_streams() {
  for (const int fd : {0, 1, 2}) {
    if (::fcntl(fd, F_GETFD) >= 0) continue;
    // The lowest free number is this one.  Writing to a missing standard output stays an error.
    const int opened = ::open("/dev/null", fd == 2 ? O_WRONLY : O_RDONLY);
    if (opened != fd && opened >= 0) ::close(opened);
  }
}

// What was printed must have arrived, or a script reads an empty answer as a good one.
int with_output_written(int status) {
  std::cout.flush();
  if (std::cout.good() && std::fflush(stdout) == 0 && !std::ferror(stdout)) return status;
  std::cerr << "titanium: BadData: standard output: writing failed; is the disk full?" << std::endl;
  return status != 0 ? status : exit_code(ErrorKind::kBadData);
}

// Memory and threads are the machine's to give: not our bug, and nothing in the input is wrong.
constexpr int kNoResources = 71;  // EX_OSERR of sysexits.h

int no_resources(std::string_view what) {
  std::cerr << "titanium: the machine has no more memory or threads for this: " << what << std::endl;
  return kNoResources;
}

// launch takes the words of a command as they are; a -- may stand before them, which CLI11 would take for
// itself.
int without_mark(int argc, char** argv) {
  if (argc < 2 || std::string_view(argv[1]) != "launch") return argc;
  char** const end = argv + argc;
  char** const mark =
      std::find_if(argv, end, [](const char* word) { return std::string_view(word) == "--"; });
  if (mark == end) return argc;
  std::rotate(mark, mark + 1, end);
  return argc - 1;
}

int run_main(int argc, char** argv) {
  open_standard_streams();
  argc = without_mark(argc, argv);
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
  add_serve(app, run);
  add_launch(app, run);
  const std::vector<const CLI::App*> commands = std::as_const(app).get_subcommands({});
  const bool known =
      argc > 1 && (argv[1][0] == '-' || std::any_of(commands.begin(), commands.end(), [&](const CLI::App* c) {
                     return c->get_name() == argv[1];
                   }));
  if (!known) {
    std::string names;
    for (const CLI::App* command : commands) names += (names.empty() ? "" : ", ") + command->get_name();
    std::cerr << "titanium: BadConfig: "
              << (argc > 1 ? fmt::format("unknown command '{}'", argv[1]) : "a command is expected")
              << "; known: " << names << std::endl;
    return exit_code(ErrorKind::kBadConfig);
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& e) {  // --help
    return with_output_written(app.exit(e));
  } catch (const CLI::ParseError& e) {
    std::cerr << "titanium: BadConfig: " << e.what() << "; see `titanium" << (argc > 1 ? " " : "")
              << (argc > 1 ? argv[1] : "") << " --help`" << std::endl;
    return exit_code(ErrorKind::kBadConfig);
  }
  try {
    return with_output_written(run());
  } catch (const Error& e) {
    std::cerr << "titanium: " << name(e.kind()) << ": " << e.what() << std::endl;
    return exit_code(e.kind());
  } catch (const std::bad_alloc& e) {
    return no_resources(e.what());
  } catch (const c10::Error& e) {
    const std::string_view text = e.what_without_backtrace();
    if (text.find("can't allocate memory") != text.npos) return no_resources(text);
    std::cerr << "titanium: Bug: " << e.what_without_backtrace() << std::endl;
    return exit_code(ErrorKind::kBug);
  } catch (const std::system_error& e) {
    if (std::ferror(stdout)) return with_output_written(exit_code(ErrorKind::kBadData));
    if (e.code() == std::errc::resource_unavailable_try_again) return no_resources(e.what());
    std::cerr << "titanium: Bug: " << e.what() << std::endl;
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
  // These commands train on no records: micro-batches may be as small as asked for.
  all.push_back("training.seq_len=2");
  all.insert(all.end(), overrides.begin(), overrides.end());
  return load_train_config(std::nullopt, all);
}

CLI::Validator not_empty() {
  return CLI::Validator([](std::string& text) { return text.empty() ? "must not be empty" : ""; }, "TEXT");
}

CLI::Validator whole_number() {
  return CLI::Validator(
      [](std::string& text) -> std::string {
        uint64_t value = 0;
        const char* end = text.data() + text.size();
        const auto result = std::from_chars(text.data(), end, value);
        return result.ec == std::errc() && result.ptr == end ? ""
                                                             : text + " is not an integer from 0 to 2^64 - 1";
      },
      "");
}

}  // namespace titanium

int main(int argc, char** argv) {
  titanium::let_idle_threads_sleep(argv);
#ifndef __SANITIZE_ADDRESS__  // which sees an overrun of a tensor where each is malloc's alone
  titanium::use_block_allocator();
#endif
  return titanium::run_main(argc, argv);
}

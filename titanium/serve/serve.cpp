#include "titanium/serve/serve.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>

#include "titanium/serve/service.h"
#include "titanium/serve/watch.h"

namespace titanium {
namespace {

// SIGTERM, and SIGINT where nobody but us would act on it, become readable on a descriptor.
Fd take_signals(bool spawned) {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGTERM);
  if (!spawned) sigaddset(&set, SIGINT);
  ::pthread_sigmask(SIG_BLOCK, &set, nullptr);  // before there are other threads, which inherit it
  if (spawned) ::signal(SIGINT, SIG_IGN);       // Ctrl-C reaches our parent too, which decides
  ::signal(SIGPIPE, SIG_IGN);                   // nobody may read our log any more
  Fd fd(::signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!fd) throw Bug("serve: signalfd: {}", std::strerror(errno));
  return fd;
}

bool asked_to_end(int signals) {
  pollfd poll{signals, POLLIN, 0};
  return ::poll(&poll, 1, 0) > 0;
}

Ending run_session(Connection& connection, Service& service, Listener* listener, int signals, Log& log) {
  WatchOptions options;
  options.listener = listener;
  options.signals = signals;
  // The server's thread may be the first to tell the others; to it the client is gone.
  options.cuts = [&service, signals](const std::string& why) {
    if (asked_to_end(signals)) service.will_lose(why);
  };
  // Who has said nothing was no client (see serve_listening).
  options.lost = [&service, listener](const std::string& why) {
    if (listener == nullptr || service.was_called()) service.lose(why);
  };
  options.give_up = [&log, listener](const std::string& why) {
    log.error("{}, and the engine is still at work: the process ends here", why);
    if (listener != nullptr) listener->remove_file();
    ::_exit(exit_code(ErrorKind::kRankLost));
  };
  const Watch watch(connection, options);
  return service.serve(connection);
}

// Of the process, which ends for that.
int status(Ending ending, Service& service) {
  switch (ending) {
    case Ending::kClosed:
      return 0;
    case Ending::kGone:
      service.lose("its client is gone");
      return exit_code(ErrorKind::kRankLost);
    case Ending::kMalformed:
      service.lose("its client sent something that is no message");
      return exit_code(ErrorKind::kBadData);
    case Ending::kFailed:
      return exit_code(service.failure().value_or(ErrorKind::kBug));
  }
  return exit_code(ErrorKind::kBug);
}

// False when a signal asks for the end.
bool wait_for_client(const Listener& listener, int signals) {
  pollfd polls[] = {{signals, POLLIN, 0}, {listener.fd(), POLLIN, 0}};
  while (::poll(polls, 2, -1) < 0) {
    if (errno != EINTR) throw Bug("serve: poll: {}", std::strerror(errno));
  }
  return polls[0].revents == 0;
}

int serve_listening(const ServeOptions& options, Service& service, int signals, Log& log) {
  Listener listener(options.listen);
  log.info("listening on {}", listener.address());
  while (wait_for_client(listener, signals)) {
    Fd client = listener.accept();
    if (!client) continue;
    Connection connection(std::move(client));
    const Ending ending = run_session(connection, service, &listener, signals, log);
    if (ending == Ending::kGone && asked_to_end(signals)) break;  // the watch has cut the connection
    // Who says nothing, or no word of this protocol, was no client; it has no say in the engine's life.
    const bool stranger = ending == Ending::kMalformed || (ending == Ending::kGone && !service.was_called());
    if (ending != Ending::kClosed && !stranger) return status(ending, service);
  }
  log.info("a signal asked the server to end");
  return 0;
}

}  // namespace

int serve(const ServeOptions& options, const EngineRegistry& registry, Log& log,
          Service::OpenWorld open_world) {
  const bool spawned = options.fd >= 0;
  if (spawned == !options.listen.empty()) throw BadConfig("serve: give --fd or --listen, one of them");
  const Fd signals = take_signals(spawned);
  Service service(registry, log, std::move(open_world));
  if (options.create) service.create(*options.create);
  if (!spawned) return serve_listening(options, service, signals.get(), log);

  // Beside the end of the socket, which a child of our parent's could hold open.  It comes also when the
  // thread that started us ends, so that must be one that lives as long as we are needed.
  ::prctl(PR_SET_PDEATHSIG, SIGTERM);
  Fd fd(options.fd);
  ::fcntl(options.fd, F_SETFD, FD_CLOEXEC);
  Connection connection(std::move(fd));
  return status(run_session(connection, service, nullptr, signals.get(), log), service);
}

}  // namespace titanium

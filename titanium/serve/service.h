// The methods that a client may call, on one engine.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "titanium/engine/engine.h"
#include "titanium/serve/arguments.h"
#include "titanium/serve/connection.h"

namespace titanium {

// How a client's time with the service came to its end.
enum class Ending {
  kClosed,     // it said close
  kGone,       // it went away without a word, or died
  kMalformed,  // it sent something that is no message
  kFailed,     // a Bug or a RankLost: the engine is not to be used any more
};

class Service {
 public:
  // The registry and the log outlive it.
  Service(const EngineRegistry& registry, Log& log) : registry_(registry), log_(log) {}

  // {config, model_type, backend, device}: makes an engine, in place of one that is there.
  void create(const Json& made_with);

  // Answers one client until it ends.  The engine stays; scopes and streams that the client left open are
  // closed.
  Ending serve(Connection& connection);

  std::optional<ErrorKind> failure() const { return failure_; }  // of kFailed
  bool was_called() const { return was_called_; }                // by the last client

 private:
  using Method = Message (Service::*)(const Message& call);
  struct Entry {
    const char* name;
    Method method;
  };
  static const Entry kMethods[];

  Message answer(const Message& call);  // throws what the method throws
  BaseEngine& engine();                 // BadConfig before create
  void release();                       // what the client left open

  Message do_create(const Message& call);
  Message do_attach(const Message& call);
  Message do_initialize(const Message& call);
  Message do_set_total_training_steps(const Message& call);
  Message do_enter_mode(const Message& call);
  Message do_exit_mode(const Message& call);
  Message do_optimizer_zero_grad(const Message& call);
  Message do_optimizer_step(const Message& call);
  Message do_lr_scheduler_step(const Message& call);
  Message do_set_param_groups(const Message& call);
  Message do_forward(const Message& call);  // the four methods with a batch
  Message do_weights_begin(const Message& call);
  Message do_weights_next(const Message& call);
  Message do_weights_end(const Message& call);
  Message do_to(const Message& call);
  Message do_save_checkpoint(const Message& call);
  Message do_load_checkpoint(const Message& call);
  Message do_enter_disable_adapter(const Message& call);
  Message do_exit_disable_adapter(const Message& call);
  Message do_close(const Message& call);

  std::unique_ptr<Loss> loss_of(const Arguments& args, const EngineBatch& batch, bool forward_only);
  Message ask(Message question);  // a call to the client, inside one of its own
  Json facts();

  const EngineRegistry& registry_;
  Log& log_;
  Connection* connection_ = nullptr;
  Json made_with_;
  std::unique_ptr<BaseEngine> engine_;
  std::optional<BucketStream> stream_;
  int64_t streams_ = 0;    // numbers them
  int64_t questions_ = 0;  // ids of our own calls
  std::vector<std::shared_ptr<void>> adapters_off_;
  bool initialized_ = false, closed_ = false, was_called_ = false;
  bool malformed_ = false;  // an answer to a question of ours was no message
  std::optional<ErrorKind> failure_;
};

}  // namespace titanium

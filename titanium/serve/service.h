// The methods that a client may call, on one engine.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "titanium/config/train_config.h"
#include "titanium/dist/world.h"
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

// One of several, where the world that `open` gives has more ranks: their clients make the same calls in the
// same order.  A call that concerns all of them is compared before it is begun, and refused on all where one
// refuses it.
class Service {
 public:
  // Waits for the other ranks, within comm's timeout.
  using OpenWorld = std::function<std::shared_ptr<World>(const CommConfig& comm)>;

  // The registry and the log outlive it.
  Service(const EngineRegistry& registry, Log& log, OpenWorld open = {})
      : registry_(registry), log_(log), open_(std::move(open)) {}

  // {config, model_type, backend, device}: makes an engine, in place of one that is there.  The first time
  // the ranks meet, and stay together for later ones.
  void create(const Json& made_with);

  // Tells the other ranks that this one is lost; what it waits for them in ends with a RankLost.  From any
  // thread.
  void lose(const std::string& why) noexcept;
  // From now on lose() says this, whatever it is given.  From any thread.
  void will_lose(const std::string& why);

  // Answers one client until it ends.  The engine stays; scopes and streams that the client left open are
  // closed.
  Ending serve(Connection& connection);

  std::optional<ErrorKind> failure() const { return failure_; }  // of kFailed
  bool was_called() const { return was_called_; }                // by the last client; from any thread

 private:
  using Method = Message (Service::*)(const Message& call);
  struct Entry {
    const char* name;
    Method method;
    bool of_all = false;  // concerns all ranks, and is compared with their calls
  };
  static const Entry kMethods[];

  Message answer(const Message& call);  // throws what the method throws
  void meet(const CommConfig& comm);
  void compare(const Message& call);  // with those of the other ranks: BadConfig on all
  BaseEngine& engine();               // BadConfig before create
  void release();                     // what the client left open

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
  OpenWorld open_;
  std::mutex world_mutex_;        // of the two that lose() reads
  std::shared_ptr<World> world_;  // null before the first create; outlives the engine
  std::string cause_;             // of will_lose(); else empty
  Group ranks_;                   // all of them, on a channel that is the service's own
  CommConfig comm_;               // of the meeting
  Connection* connection_ = nullptr;
  Json made_with_;
  std::unique_ptr<BaseEngine> engine_;
  std::optional<BucketStream> stream_;
  int64_t streams_ = 0;    // numbers them
  int64_t questions_ = 0;  // ids of our own calls
  std::vector<std::shared_ptr<void>> adapters_off_;
  std::atomic<bool> was_called_ = false;
  bool initialized_ = false, closed_ = false;
  bool malformed_ = false;  // an answer to a question of ours was no message
  std::optional<ErrorKind> failure_;
};

}  // namespace titanium

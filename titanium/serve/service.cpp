#include "titanium/serve/service.h"

#include <ATen/ATen.h>
#include <unistd.h>

#include "titanium/dist/agree.h"
#include "titanium/engine/config_keys.h"
#include "titanium/loss/external.h"
#include "titanium/serve/losses.h"

namespace titanium {
namespace {

CommConfig read_comm(const Json& config) {
  CommConfig comm;
  std::vector<std::string> notes;
  ConfigKeys keys(config, "comm", "engine config", notes);
  comm.transport = keys.one_of("transport", {"auto", "local", "gloo", "nccl"}).value_or(comm.transport);
  comm.init_timeout_seconds = keys.integer("init_timeout_seconds", 1).value_or(comm.init_timeout_seconds);
  comm.train_timeout_seconds = keys.integer("train_timeout_seconds", 1).value_or(comm.train_timeout_seconds);
  keys.finish();
  return comm;
}

bool same(const CommConfig& a, const CommConfig& b) {
  return a.transport == b.transport && a.init_timeout_seconds == b.init_timeout_seconds &&
         a.train_timeout_seconds == b.train_timeout_seconds;
}

// A line for every argument, so that one that differs, or that one rank alone has, can be named.
std::string lines_of(const std::string& name, const Json& json) {
  std::string lines = name + '\n';
  const Json flat = json.flatten();  // "/loss/clip_ratio"; {} and [] are null in it
  for (const auto& [path, value] : flat.items()) {
    if (path.empty()) continue;
    const Json& given = value.is_null() ? json.at(Json::json_pointer(path)) : value;
    lines +=
        fmt::format("{} = {}\n", path.substr(1), given.dump(-1, ' ', false, Json::error_handler_t::replace));
  }
  return lines;
}

}  // namespace

const Service::Entry Service::kMethods[] = {
    {"create", &Service::do_create},
    {"attach", &Service::do_attach},
    {"initialize", &Service::do_initialize, /*of_all=*/true},
    {"set_total_training_steps", &Service::do_set_total_training_steps},
    {"enter_mode", &Service::do_enter_mode},
    {"exit_mode", &Service::do_exit_mode},
    {"optimizer_zero_grad", &Service::do_optimizer_zero_grad},
    {"optimizer_step", &Service::do_optimizer_step, /*of_all=*/true},
    {"lr_scheduler_step", &Service::do_lr_scheduler_step},
    {"set_param_groups", &Service::do_set_param_groups},
    {"forward_backward_batch", &Service::do_forward, /*of_all=*/true},
    {"forward_step", &Service::do_forward, /*of_all=*/true},
    {"train_batch", &Service::do_forward, /*of_all=*/true},
    {"infer_batch", &Service::do_forward, /*of_all=*/true},
    {"weights_begin", &Service::do_weights_begin, /*of_all=*/true},
    {"weights_next", &Service::do_weights_next},
    {"weights_end", &Service::do_weights_end},
    {"to", &Service::do_to},
    {"save_checkpoint", &Service::do_save_checkpoint, /*of_all=*/true},
    {"load_checkpoint", &Service::do_load_checkpoint, /*of_all=*/true},
    {"enter_disable_adapter", &Service::do_enter_disable_adapter},
    {"exit_disable_adapter", &Service::do_exit_disable_adapter},
    {"close", &Service::do_close},
};

Ending Service::serve(Connection& connection) {
  connection_ = &connection;
  closed_ = was_called_ = malformed_ = false;
  const auto run = [&] {
    Message greeting = Message::reply_to(Message::call("hello", 0));
    greeting.body = {{"protocol", kWireVersion}, {"pid", ::getpid()}, {"created", engine_ != nullptr}};
    connection.send(std::move(greeting));
    while (!closed_) {
      const std::optional<Message> call = connection.receive();
      if (!call) return Ending::kGone;
      if (call->type != Message::Type::kCall)
        throw BadData("message: a {} came where a call was expected", call->name);
      was_called_ = true;
      const auto fail = [&](ErrorKind kind, const std::string& text) {
        if (kind == ErrorKind::kBug || kind == ErrorKind::kRankLost) {
          failure_ = kind;
          lose(text);
        }
        connection.send(Message::error_to(call->id, name(kind), text));
      };
      try {
        connection.send(answer(*call));
      } catch (const PeerGone&) {
        throw;
      } catch (const Error& error) {
        if (malformed_) throw BadData("{}", error.what());
        fail(error.kind(), error.what());
      } catch (const c10::Error& error) {
        fail(ErrorKind::kBug, error.what_without_backtrace());
      } catch (const std::exception& error) {
        fail(ErrorKind::kBug, error.what());
      }
      if (failure_) return Ending::kFailed;
    }
    return Ending::kClosed;
  };
  Ending ending = Ending::kGone;
  try {
    ending = run();
  } catch (const PeerGone& gone) {
    log_.info("the client is gone: {}", gone.what());
  } catch (const BadData& malformed) {  // where the next message begins is not known any more
    log_.error("{}", malformed.what());
    ending = Ending::kMalformed;
    try {
      connection.send(Message::error_to(0, name(malformed.kind()), malformed.what()));
    } catch (const PeerGone&) {
    }
  }
  // Before the scopes close: what that does to a stream of all ranks would be all that the others hear.
  if (ending == Ending::kGone && was_called_) lose("its client is gone");
  if (ending != Ending::kFailed) release();
  connection_ = nullptr;
  return ending;
}

void Service::release() {
  stream_.reset();
  adapters_off_.clear();
  while (engine_ && engine_->mode() != Mode::kNone) engine_->exit_mode(/*failed=*/true);
}

Message Service::answer(const Message& call) {
  for (const Entry& entry : kMethods) {
    if (call.name != entry.name) continue;
    if (entry.of_all && ranks_.size() > 1) compare(call);
    return (this->*entry.method)(call);
  }
  throw BadConfig("unknown method '{}'; docs/serve.md lists them", call.name);
}

void Service::compare(const Message& call) {
  Json all = call.body;
  for (const char* own : {"micro", "temperature"}) all.erase(own);  // each data rank has its rows
  agree_on(ranks_, "the call", lines_of(call.name, all));
}

void Service::meet(const CommConfig& comm) {
  if (world_) return;
  std::shared_ptr<World> world = open_ ? open_(comm) : solo_world();
  ranks_ = world->all("calls");
  comm_ = comm;
  const std::lock_guard lock(world_mutex_);
  world_ = std::move(world);
}

void Service::lose(const std::string& why) noexcept {
  std::shared_ptr<World> world;
  std::string cause;
  {
    const std::lock_guard lock(world_mutex_);
    world = world_;
    cause = cause_;
  }
  if (world && world->size() > 1) world->fail(cause.empty() ? why : cause);
}

void Service::will_lose(const std::string& why) {
  const std::lock_guard lock(world_mutex_);
  cause_ = why;
}

BaseEngine& Service::engine() {
  if (!engine_) throw BadConfig("there is no engine yet: call create first (connect with a config)");
  return *engine_;
}

Json Service::facts() {
  const BaseEngine& made = engine();  // where there is one there is a world
  return {{"rank", world_->rank()},
          {"world_size", world_->size()},
          {"data_parallel_rank", made.get_data_parallel_rank()},
          {"data_parallel_size", made.get_data_parallel_size()},
          {"is_mp_src_rank_with_outputs", made.is_mp_src_rank_with_outputs()},
          {"is_param_offload_enabled", made.is_param_offload_enabled()},
          {"is_optimizer_offload_enabled", made.is_optimizer_offload_enabled()}};
}

void Service::create(const Json& made_with) {
  Message call = Message::call("create", 0);
  call.body = made_with;
  do_create(call);
}

Message Service::do_create(const Message& call) {
  const Arguments args(call, {"config", "model_type", "backend", "device"});
  Json sections = args.at("config");
  // Before anything else that can be refused: it is refused on all ranks, and so they must have met.
  const CommConfig comm = sections.is_object() ? read_comm(sections) : CommConfig();
  meet(comm);
  if (sections.is_object()) sections.erase("comm");
  const auto text = [&](const char* key, const char* absent) {
    return args.has(key) ? args.text(key) : absent;
  };
  const std::string model_type = text("model_type", "language_model"), backend = text("backend", "titanium"),
                    device = text("device", "cpu");
  EngineConfig config;
  agree(ranks_, [&] {
    if (ranks_.size() > 1 && !same(comm, comm_))
      throw BadConfig("engine config: comm differs from that with which the ranks have met; they meet once");
    config = EngineConfig::from_json(sections);
    registry_.get_engine_cls(model_type, backend, device);
  });
  if (ranks_.size() > 1)
    agree_on(ranks_, "the engine", fmt::format("{}, {}, {}", model_type, backend, device));
  // Light, as no weights are read yet: what is refused is refused before the old engine is gone.
  std::unique_ptr<BaseEngine> made = registry_.create(model_type, backend, device, config, log_, world_);
  release();
  initialized_ = false;
  engine_ = std::move(made);
  made_with_ = {
      {"config", args.at("config")}, {"model_type", model_type}, {"backend", backend}, {"device", device}};
  Message reply = Message::reply_to(call);
  reply.body = facts();
  return reply;
}

Message Service::do_attach(const Message& call) {
  const Arguments args(call, {});
  Message reply = Message::reply_to(call);
  reply.body = {{"facts", facts()},
                {"made_with", made_with_},
                {"initialized", initialized_},
                {"param_groups", param_groups_json(engine().param_groups())}};
  return reply;
}

Message Service::do_initialize(const Message& call) {
  const Arguments args(call, {});
  engine().initialize();
  initialized_ = true;
  Message reply = Message::reply_to(call);
  reply.body["param_groups"] = param_groups_json(engine().param_groups());
  return reply;
}

Message Service::do_set_total_training_steps(const Message& call) {
  engine().set_total_training_steps(Arguments(call, {"steps"}).integer("steps"));
  return Message::reply_to(call);
}

Message Service::do_enter_mode(const Message& call) {
  const Arguments args(call, {"mode", "disable_auto_offload", "zero_grad_on_exit"});
  const std::string mode = args.text("mode");
  if (mode != "train" && mode != "eval")
    throw BadConfig("enter_mode: mode is '{}'; allowed: train, eval", mode);
  engine().enter_mode(mode == "train" ? Mode::kTrain : Mode::kEval,
                      {.disable_auto_offload = args.flag("disable_auto_offload", false),
                       .zero_grad_on_exit = args.flag("zero_grad_on_exit", true)});
  return Message::reply_to(call);
}

Message Service::do_exit_mode(const Message& call) {
  const Arguments args(call, {"failed"});
  if (engine().mode() == Mode::kNone) throw BadConfig("exit_mode: no mode has been entered");
  engine().exit_mode(args.flag("failed", false));
  return Message::reply_to(call);
}

Message Service::do_optimizer_zero_grad(const Message& call) {
  const Arguments args(call, {});
  engine().optimizer_zero_grad();
  return Message::reply_to(call);
}

Message Service::do_optimizer_step(const Message& call) {
  const Arguments args(call, {});
  Message reply = Message::reply_to(call);
  reply.body["grad_norm"] = json_number(engine().optimizer_step());
  return reply;
}

Message Service::do_lr_scheduler_step(const Message& call) {
  const Arguments args(call, {});
  Message reply = Message::reply_to(call);
  reply.body["lr"] = json_number(engine().lr_scheduler_step());
  reply.body["param_groups"] = param_groups_json(engine().param_groups());
  return reply;
}

Message Service::do_set_param_groups(const Message& call) {
  const Arguments args(call, {"param_groups"});
  std::vector<ParamGroup> groups = read_param_groups(args.at("param_groups"));
  if (groups.size() != engine().param_groups().size()) {
    throw BadConfig("param_groups: {} groups were given, the engine has {}", groups.size(),
                    engine().param_groups().size());
  }
  engine().param_groups() = std::move(groups);
  return Message::reply_to(call);
}

Message Service::ask(Message question) {
  const int64_t id = question.id = ++questions_;
  const std::string what = question.name;
  connection_->send(std::move(question));
  while (true) {
    std::optional<Message> answer;
    try {
      answer = connection_->receive();
    } catch (const BadData&) {
      malformed_ = true;  // more than a call that fails: the stream has no meaning any more
      throw;
    }
    if (!answer) {
      // The first leaves as what it is, whoever agrees on errors in between.
      if (ranks_.size() > 1) throw RankLost("the client ended while it was asked for {}", what);
      throw PeerGone("the client ended while it was asked for " + what);
    }
    if (answer->type == Message::Type::kCall) {
      connection_->send(
          Message::error_to(answer->id, name(ErrorKind::kBadConfig),
                            answer->name + ": not possible while the engine waits for " + what));
      continue;
    }
    if (answer->id != id) throw BadData("{}: the answer has id {}, expected {}", what, answer->id, id);
    if (answer->type == Message::Type::kError)
      throw BadData("the caller's {} failed: {}", what, answer->text);
    return std::move(*answer);
  }
}

std::unique_ptr<Loss> Service::loss_of(const Arguments& args, const EngineBatch& batch, bool forward_only) {
  if (!args.has("loss")) return nullptr;
  const Json& json = args.at("loss");
  if (!json.is_object() || json.value("name", Json()) != "external") return make_loss(json);
  if (json.size() != 1) throw BadConfig("loss external: it has no settings");

  const auto each = [](const auto& take) {
    take("log_probs", &TokenStats::logprob);
    take("entropy", &TokenStats::entropy);
    take("values", &TokenStats::value);
    take("sum_pi_squared", &TokenStats::sum_pi_squared);
  };
  const auto ask_client = [this, each, forward_only, i = int64_t{0}](const TokenStats& now,
                                                                     const PackedBatch& packed) mutable {
    Message question = Message::call("loss", 0);
    question.body = {{"i", i++}, {"forward_only", forward_only}};
    each([&](const char* name, at::Tensor TokenStats::*member) {
      if ((now.*member).defined()) add_tensor(question, name, now.*member);
    });
    question.add("offsets", packed.bounds);
    question.add("sample", packed.sample);
    const Message reply = ask(std::move(question));

    const Arguments args(reply, {"loss", "metrics"});
    ExternalAnswer answer;
    answer.loss = as_number(args.at("loss"), "loss");
    if (args.has("metrics")) answer.reports = read_reports(args.at("metrics"));
    each([&](const char* name, at::Tensor TokenStats::*member) {
      if (const TensorView* view = reply.find(name)) answer.gradient.*member = read_tensor(*view);
    });
    return answer;
  };
  return std::make_unique<ExternalLoss>(
      ask_client,
      HeadWants{.entropy = batch.calculate_entropy, .sum_pi_squared = batch.calculate_sum_pi_squared});
}

Message Service::do_forward(const Message& call) {
  const bool takes_flag = call.name == "forward_backward_batch";
  const Arguments args(call, {"loss", "forward_only", "temperature", "micro", "counts", "calculate_entropy",
                              "calculate_sum_pi_squared", "return_model_output"});
  if (!takes_flag && args.has("forward_only")) {
    throw BadConfig("{}: argument 'forward_only' is of forward_backward_batch", call.name);
  }
  EngineBatch batch;
  bool forward_only = call.name != "train_batch";
  std::unique_ptr<Loss> loss;
  agree(ranks_, [&] {
    batch = read_batch(call, args);
    if (takes_flag) forward_only = args.flag("forward_only", false);
    loss = loss_of(args, batch, forward_only);
  });
  EngineOutput output;
  if (takes_flag) {
    output = engine().forward_backward_batch(batch, loss.get(), forward_only);
  } else if (call.name == "train_batch") {
    if (!loss) throw BadConfig("train_batch: a loss is needed");
    output = engine().train_batch(batch, *loss);
  } else if (call.name == "infer_batch") {
    output = engine().infer_batch(batch, loss.get());
  } else {
    output = engine().forward_step(batch, loss.get());
  }
  Message reply = Message::reply_to(call);
  add_output(reply, output);
  return reply;
}

Message Service::do_weights_begin(const Message& call) {
  const Arguments args(
      call, {"dtype", "keep_fp32", "tied_head", "bucket_bytes", "version", "checksums", "threads"});
  const SyncOptions options = read_sync_options(args);
  stream_.reset();  // one at a time
  auto [tensors, adapter] = engine().get_per_tensor_param(options);
  stream_.emplace(std::move(tensors).into_buckets());
  const StreamHeader& header = stream_->header();
  Json specs = Json::array();
  for (const TensorSpec& spec : header.tensors) specs.push_back({spec.name, name(spec.dtype), spec.shape});
  Message reply = Message::reply_to(call);
  reply.body = {{"stream", ++streams_},          {"adapter", adapter ? *adapter : Json()},
                {"version", header.version},     {"tensors", std::move(specs)},
                {"bytes", header.bytes},         {"buckets", header.buckets},
                {"checksums", options.checksums}};
  return reply;
}

Message Service::do_weights_next(const Message& call) {
  const Arguments args(call, {"stream"});
  Message reply = Message::reply_to(call);
  const int64_t wanted = args.integer("stream");
  if (!stream_ || wanted != streams_) throw BadConfig("weights_next: stream {} has ended", wanted);
  const std::optional<Bucket> bucket = stream_->next();
  if (!bucket) {
    reply.body = {{"end", true}, {"checksum", fmt::format("{:016x}", stream_->checksum())}};
    stream_.reset();
    return reply;
  }
  Json names = Json::array(), checksums = Json::object();
  for (const BucketTensor& tensor : bucket->tensors) {
    names.push_back(tensor.spec.name);
    checksums[tensor.spec.name] = fmt::format("{:016x}", tensor.checksum);
    // The bucket is valid until the next call of next(): the reply is sent before.
    reply.tensors.push_back({tensor.spec.name, tensor.spec.dtype, tensor.spec.shape,
                             bucket->bytes.data() + tensor.offset, tensor.spec.nbytes()});
  }
  reply.body = {{"end", false},
                {"index", bucket->index},
                {"names", std::move(names)},
                {"checksums", std::move(checksums)}};
  return reply;
}

Message Service::do_weights_end(const Message& call) {
  const Arguments args(call, {"stream"});
  if (args.integer("stream") == streams_) stream_.reset();
  return Message::reply_to(call);
}

Message Service::do_to(const Message& call) {
  const Arguments args(call, {"device", "model", "optimizer", "grad"});
  engine().to(args.text("device"), args.flag("model", true), args.flag("optimizer", true),
              args.flag("grad", true));
  return Message::reply_to(call);
}

Message Service::do_save_checkpoint(const Message& call) {
  const Arguments args(call, {"local_path", "global_step", "max_ckpt_to_keep"});
  const int64_t step = args.integer("global_step", 0), keep = args.integer("max_ckpt_to_keep", 0);
  if (step < 0 || keep < 0) {
    throw BadConfig("save_checkpoint: global_step {} and max_ckpt_to_keep {} must be at least 0", step, keep);
  }
  engine().save_checkpoint(args.path("local_path"), step, keep);
  return Message::reply_to(call);
}

Message Service::do_load_checkpoint(const Message& call) {
  const Arguments args(call, {"local_path"});
  engine().load_checkpoint(args.has("local_path") ? args.path("local_path") : "");
  Message reply = Message::reply_to(call);
  reply.body["param_groups"] = param_groups_json(engine().param_groups());
  return reply;
}

Message Service::do_enter_disable_adapter(const Message& call) {
  const Arguments args(call, {});
  adapters_off_.push_back(engine().disable_adapter());
  return Message::reply_to(call);
}

Message Service::do_exit_disable_adapter(const Message& call) {
  const Arguments args(call, {});
  if (adapters_off_.empty()) throw BadConfig("exit_disable_adapter: it is not disabled");
  adapters_off_.pop_back();
  return Message::reply_to(call);
}

Message Service::do_close(const Message& call) {
  const Arguments args(call, {});
  closed_ = true;
  return Message::reply_to(call);
}

}  // namespace titanium

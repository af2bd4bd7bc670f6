// The checkpoints of an engine.  A folder, by custom .../global_step_N, holds
//   step-<N>/      masters, optimizer state, manifest (weights/checkpoint.h); there and complete by one
//   rename huggingface/   config.json, generation config, tokenizer; with hf_model full weights too
// and whatever else the trainer puts beside them.  All ranks share it: the first makes and removes folders
// and writes what there is one of, each writes its own slices.
#include <algorithm>

#include "titanium/base/error.h"
#include "titanium/dist/agree.h"
#include "titanium/engine/titan_engine.h"
#include "titanium/weights/checkpoint.h"
#include "titanium/weights/hf_export.h"
#include "titanium/weights/manifest.h"
#include "titanium/weights/patience.h"

namespace titanium {
namespace {

namespace fs = std::filesystem;

void check(const std::error_code& error, const fs::path& path, const char* what) {
  if (error) throw BadCheckpoint("{}: {}: {}", path.string(), what, error.message());
}

fs::path full(const fs::path& path) {
  return fs::absolute(path).lexically_normal();
}

CheckpointOptions in_folder(const fs::path& folder) {
  CheckpointOptions options;
  options.folder = folder;
  options.keep_latest_k = 1;
  options.async = false;
  return options;
}

Json to_json(const ParamGroup& group) {
  return {{"lr", group.lr},
          {"betas", {group.beta1, group.beta2}},
          {"eps", group.eps},
          {"weight_decay", group.weight_decay}};
}

// What save_checkpoint has written, or BadCheckpoint: the file is not ours to trust.
ParamGroup group_from(const Json& json, const std::string& folder) {
  try {
    return {json.at("lr").get<double>(), json.at("betas").at(0).get<double>(),
            json.at("betas").at(1).get<double>(), json.at("eps").get<double>(),
            json.at("weight_decay").get<double>()};
  } catch (const Json::exception& e) {
    throw BadCheckpoint("{}: its param groups cannot be read: {}", folder, e.what());
  }
}

}  // namespace

Json TitanEngine::config_json() const {
  Json json = session_->spec.config.to_json();
  if (head_ != ModelHead::kValue) return json;
  // What transformers calls this head.
  Json architectures = json.value("architectures", Json::array());  // strings: the reader has checked
  for (Json& name : architectures) {
    std::string text = name.get<std::string>();
    if (text.ends_with("ForCausalLM")) text = text.substr(0, text.size() - 11) + "ForTokenClassification";
    name = text;
  }
  json["architectures"] = architectures;
  json["id2label"] = {{"0", "LABEL_0"}};
  json["label2id"] = {{"LABEL_0", 0}};
  json["num_labels"] = 1;
  return json;
}

// Files that the others need not touch; however long the disk takes.
void TitanEngine::on_first_rank(const std::function<void()>& work) const {
  agree_patiently(world_->all(), [&](const std::atomic<bool>&) {
    if (leads()) work();
  });
}

void TitanEngine::save_huggingface(const fs::path& folder) const {
  const fs::path from =
      config_.model.tokenizer_path.empty() ? config_.model.path : config_.model.tokenizer_path;
  std::error_code error;
  if (config_.checkpoint.save.hf_model) {
    HfExportOptions options;
    options.tokenizer_from = from;
    options.overwrite = true;
    export_hf(*session_->store, config_json(), folder, options);
    return;
  }
  on_first_rank([&] {
    fs::path partial = folder;
    partial += ".partial";
    fs::remove_all(partial, error);
    check(error, partial, "an interrupted save cannot be removed");
    export_hf_config(config_json(), partial, from);
    fs::remove_all(folder, error);  // weights of an earlier save are not those of this one
    check(error, folder, "cannot be removed");
    fs::rename(partial, folder, error);
    check(error, folder, "cannot be put in place");
  });
}

void TitanEngine::save_checkpoint(const fs::path& local_path, int64_t global_step, int64_t max_ckpt_to_keep) {
  require_initialized("save_checkpoint");
  const Group& all = world_->all();
  const CheckpointContents& contents = config_.checkpoint.save;
  Json train = Json::object();
  if (contents.extra && schedule_) train["lr_position"] = schedule_->position();
  if (contents.optimizer && optimizer_) train["param_groups"] = {to_json(groups_.at(0))};
  const std::string arguments = agreed(all, [&] {
    if (local_path.empty()) throw BadConfig("save_checkpoint: local_path is empty");
    if (global_step < 0)
      throw BadConfig("save_checkpoint: global_step = {}: allowed: an integer >= 0", global_step);
    if (max_ckpt_to_keep < 0)
      throw BadConfig("save_checkpoint: max_ckpt_to_keep = {}: allowed: 0 (all) or more", max_ckpt_to_keep);
    return fmt::format("{}, step {}, max_ckpt_to_keep {}, {}", full(local_path).string(), global_step,
                       max_ckpt_to_keep, train.dump());
  });
  agree_on(all, "the save_checkpoint call", arguments);
  on_first_rank([&] {
    std::error_code error;
    fs::create_directories(local_path, error);
    check(error, local_path, "cannot be made");
  });
  save_huggingface(local_path / "huggingface");
  if (contents.model) {  // the last thing that is written: it makes the checkpoint one
    Checkpointer(*session_->store, contents.optimizer ? optimizer_.get() : nullptr, in_folder(local_path))
        .save(global_step, std::move(train));
  }
  log_.info("{}: saved step {}", local_path.string(), global_step);
  on_first_rank([&] { prune(local_path, max_ckpt_to_keep); });
}

void TitanEngine::prune(const fs::path& saved, int64_t keep) {
  const fs::path path = full(saved);
  std::erase(saved_, path);
  saved_.push_back(path);
  while (keep > 0 && static_cast<int64_t>(saved_.size()) > keep) {
    const fs::path oldest = saved_.front();
    saved_.erase(saved_.begin());
    // Out of the way in one step, so that a kill leaves no half of a checkpoint under its name.
    fs::path wreck = oldest;
    wreck += ".removed";
    std::error_code error;
    if (!fs::exists(oldest, error)) continue;
    fs::remove_all(wreck, error);  // of a process that was killed here
    fs::rename(oldest, wreck, error);
    check(error, oldest, "cannot be renamed");
    fs::remove_all(wreck, error);
    check(error, wreck, "cannot be removed");
  }
}

TitanEngine::Position TitanEngine::position_in(const fs::path& checkpoint, bool takes_optimizer,
                                               bool takes_extra) const {
  const Json train = read_manifest(checkpoint).train;
  Position out;
  if (takes_extra) {
    const auto found = train.find("lr_position");
    if (found == train.end() || !found->is_number_integer() || *found < 0)
      throw BadCheckpoint(
          "{}: holds no position of the LR schedule (checkpoint.load_contents asks for extra)",
          checkpoint.string());
    out.schedule = found->get<int64_t>();
  }
  if (takes_optimizer && train.contains("param_groups") && train["param_groups"].is_array() &&
      !train["param_groups"].empty())
    out.group = group_from(train["param_groups"][0], checkpoint.string());
  return out;
}

void TitanEngine::load_checkpoint(const fs::path& local_path) {
  require_initialized("load_checkpoint");
  const Group& all = world_->all();
  const std::string path = agreed(all, [&] { return local_path.empty() ? "" : full(local_path).string(); });
  agree_on(all, "the load_checkpoint call", path);
  if (local_path.empty()) return;
  const CheckpointContents& contents = config_.checkpoint.load;
  agree(all, [&] {
    std::error_code error;
    if (!fs::is_directory(local_path, error))
      throw BadCheckpoint("{}: there is no such folder", local_path.string());
  });
  const bool takes_optimizer = contents.optimizer && optimizer_, takes_extra = contents.extra && schedule_;
  LatestCheckpoint latest;  // of our own files
  Position position;
  if (contents.model || contents.extra) {
    latest = find_latest(local_path, all);
    for (const std::string& warning : latest.warnings) log_.warn("{}", warning);
    if (!latest.found) {
      throw BadCheckpoint(
          "{}: holds no complete checkpoint (checkpoint.load_contents asks for {}); it must be the folder "
          "that "
          "save_checkpoint was given",
          local_path.string(), contents.model ? "model" : "extra");
    }
    position = agreed(all, [&] { return position_in(latest.found->path, takes_optimizer, takes_extra); });
  }
  // The last that can fail; each of the two changes all or nothing.
  if (contents.model) {
    Checkpointer files(*session_->store, takes_optimizer ? optimizer_.get() : nullptr, in_folder(local_path));
    takes_optimizer ? files.load(latest.found->path) : files.load_masters(latest.found->path);
  } else if (contents.hf_model) {
    load_session_weights(local_path / "huggingface", session_options(), *session_, log_);
  }
  if (takes_extra) {
    schedule_->set_position(position.schedule);
    groups_.at(0).lr = schedule_->lr();
  }
  if (position.group) groups_ = {*position.group};
  if (latest.found) log_.info("{}: loaded step {}", local_path.string(), latest.found->step);
  zero_gradients();
}

}  // namespace titanium

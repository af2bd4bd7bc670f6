#include "titanium/train/training_data.h"

#include "titanium/base/error.h"
#include "titanium/dist/agree.h"
#include "titanium/formats/json.h"

namespace titanium {

TextTools load_text_tools(const std::filesystem::path& folder, const std::string& chat_template_path) {
  require_model_folder(folder);
  TextTools text;
  if (!chat_template_path.empty()) {
    text.own_template = read_file(chat_template_path);
    text.chat_template = ChatTemplate::compile(*text.own_template, chat_template_path);
  }
  if (!std::filesystem::exists(folder / "tokenizer.json")) return text;
  text.tokenizer = Tokenizer::from_folder(folder);
  if (chat_template_path.empty()) {
    const auto& templates = text.tokenizer->chat_templates();
    const auto found = templates.find("default");
    if (found != templates.end())
      text.chat_template = ChatTemplate::compile(found->second, folder.string() + ": chat_template");
  }
  return text;
}

namespace {

// A step of so many passes over the data is a slip of the keys, and would not fit the memory.
constexpr int64_t kMostEpochsAStep = 1000;

void check_step_size(const TrainingConfig& config, const Dataset& train) {
  const auto records = static_cast<int64_t>(train.train().size());
  if (config.global_batch_size / kMostEpochsAStep > records) {
    throw BadConfig("training.global_batch_size = {}: more than {} times the {} records to train on",
                    config.global_batch_size, kMostEpochsAStep, records);
  }
  int64_t tokens = 0;
  for (const int64_t record : train.train()) tokens += train.length(record);
  if (config.global_batch_tokens / kMostEpochsAStep > tokens) {
    throw BadConfig("training.global_batch_tokens = {}: more than {} times the {} tokens to train on",
                    config.global_batch_tokens, kMostEpochsAStep, tokens);
  }
}

}  // namespace

TrainingData load_training_data(const TrainConfig& config, const Session& session, Log& log) {
  const Group& ranks = session.store->mesh().all();
  TextTools text = agreed(ranks, [&] { return load_text_tools(session.folder, config.data.chat_template); });
  DataOptions options;
  options.files = config.data.path;
  options.form = record_form_from(config.data.format);
  options.vocab_size = session.spec.config.vocab_size;
  options.max_tokens = config.training.seq_len;
  options.max_tokens_key = "training.seq_len";
  options.on_long = on_long_from(config.data.on_long_record);
  options.on_bad = on_bad_from(config.data.on_bad_record);
  options.append_eos = config.data.add_eos;
  options.mask = {config.data.mask_trailing_newline, config.data.mask_last_turn_only};
  options.seed = static_cast<uint64_t>(config.training.seed);
  options.validation_split = config.data.validation_split;
  options.threads = static_cast<int>(config.training.threads);
  if (text.own_template && !text.tokenizer) {
    log.warn("data.chat_template = {} has no effect: {} has no tokenizer.json", config.data.chat_template,
             session.folder.string());
  }
  const Tokenizer* tokenizer = text.tokenizer ? &*text.tokenizer : nullptr;
  const ChatTemplate* chat_template = text.chat_template ? &*text.chat_template : nullptr;

  const auto load = [&](const char* what, const DataOptions& o) {
    Dataset data =
        Dataset::load(o, tokenizer, chat_template,
                      {.rank = ranks.rank(), .size = ranks.size(), .exchange = [&](const std::string& mine) {
                         return ranks.exchange(mine);
                       }});
    log.info("{} data: {}", what, data.summary().text());
    if (data.summary().dropped_tokens > 0) {
      log.warn("{} data: {} records cut to training.seq_len = {}, {} tokens lost", what,
               data.summary().truncated, o.max_tokens, data.summary().dropped_tokens);
    }
    if (!data.summary().first_rejected.empty())
      log.warn("{} data: first record left out: {}", what, data.summary().first_rejected);
    const int64_t positions = session.spec.config.max_position_embeddings;
    if (positions > 0 && data.summary().longest > positions) {
      log.warn(
          "{} data: the longest record has {} tokens, the model was made for {} "
          "(max_position_embeddings of its config.json)",
          what, data.summary().longest, positions);
    }
    return data;
  };
  Dataset train = load("training", options);
  check_step_size(config.training, train);
  std::optional<Dataset> validation;
  std::vector<int64_t> validation_records = train.validation();
  if (!config.data.validation_path.empty()) {
    options.files = config.data.validation_path;
    options.validation_split = 0;
    validation = load("validation", options);
    validation_records = validation->train();
  }

  SamplerOptions order;
  order.seed = static_cast<uint64_t>(config.training.seed);
  order.shuffle = config.data.shuffle;
  if (config.training.global_batch_tokens > 0) {
    order.global_batch_tokens = config.training.global_batch_tokens;
  } else {
    order.global_batch_size = config.training.global_batch_size;
  }
  order.epochs = config.training.steps > 0 ? 0 : config.data.epochs;
  order.last_batch = last_batch_from(config.data.last_batch);
  const auto lengths = std::make_shared<std::vector<int64_t>>();  // of all copies of the sampler
  if (order.global_batch_tokens > 0) {
    for (int64_t record = 0; record < train.size(); ++record) lengths->push_back(train.length(record));
  }
  Sampler sampler(train.train(), order, [lengths](int64_t record) { return lengths->at(record); });
  const int64_t steps =
      config.training.steps > 0 ? config.training.steps : sampler.steps_for(config.data.epochs);
  if (config.training.steps <= 0 && sampler.left_out(config.data.epochs) > 0) {
    log.info(
        "{} samples at the end of the last epoch do not fill a batch and are left out (data.last_batch = "
        "\"{}\")",
        sampler.left_out(config.data.epochs), config.data.last_batch);
  }
  return {std::move(text),       std::move(train),
          std::move(validation), std::move(validation_records),
          std::move(sampler),    steps};
}

}  // namespace titanium

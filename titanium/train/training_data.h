// The data of a run: records as tokens, and which of them form a step.
#pragma once
#include <memory>
#include <optional>
#include <vector>

#include "titanium/config/train_config.h"
#include "titanium/data/dataset.h"
#include "titanium/data/sampler.h"
#include "titanium/report/log.h"
#include "titanium/train/session.h"

namespace titanium {

// What turns text into tokens: of the model's folder, or of the config where that names a template.
struct TextTools {
  std::optional<Tokenizer> tokenizer;  // absent when the folder has none: input_ids still work
  std::optional<ChatTemplate> chat_template;
  std::optional<std::string> own_template;  // the text of the one that the config names
};
// BadConfig: a file that cannot be read or understood, also where there is no tokenizer to use it.
TextTools load_text_tools(const std::filesystem::path& folder, const std::string& chat_template_path);

struct TrainingData {
  TextTools text;
  Dataset train;
  std::optional<Dataset> validation;        // a data set of its own, or
  std::vector<int64_t> validation_records;  // records of `train` kept out by validation_split
  Sampler sampler;
  int64_t steps = 0;  // updates of the run

  const Dataset& validation_data() const { return validation ? *validation : train; }
};
// Warns of what was left out, and of records beyond the model's positions.  BadConfig, BadData: the same on
// all ranks of the session's mesh, which read a part of the records each and hold all.
TrainingData load_training_data(const TrainConfig& config, const Session& session, Log& log);

}  // namespace titanium

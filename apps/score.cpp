#include <fmt/format.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <limits>
#include <optional>

#include "apps/commands.h"
#include "apps/on_ranks.h"
#include "titanium/base/error.h"
#include "titanium/data/dataset.h"
#include "titanium/dist/agree.h"
#include "titanium/formats/json.h"
#include "titanium/text/chat_mask.h"
#include "titanium/train/score.h"
#include "titanium/train/session.h"
#include "titanium/train/training_data.h"

namespace titanium {
namespace {

struct Flags {
  std::string folder, file, format = "auto", output, dtype = "float32";
  std::vector<std::string> texts;
  double temperature = 1;
  int64_t max_tokens = 4096;
};

// One line a record: ids, log-probs and entropies of all tokens, perplexity of those with loss.
class Writer {
 public:
  explicit Writer(const std::string& path) {
    if (path.empty()) return;
    file_.open(path, std::ios::trunc);
    if (!file_) throw BadConfig("--output {}: cannot be written", path);
    path_ = path;
  }
  void write(const Sample& sample, const TokenScores& scores) {
    double sum = 0;
    int64_t count = 0;
    for (size_t i = 0; i < sample.ids.size(); ++i) {
      if (std::isfinite(scores.logprob[i]) && std::isfinite(scores.entropy[i])) continue;
      throw BadData("record {}, token {}: log-prob {}, entropy {}: {}", records_, i, scores.logprob[i],
                    scores.entropy[i], "are the weights finite, and is --temperature large enough?");
    }
    ++records_;
    for (size_t i = 1; i < sample.ids.size(); ++i) {
      if (!sample.loss_mask[i]) continue;
      sum += scores.logprob[i];
      ++count;
    }
    Json line{{"input_ids", sample.ids},
              {"loss_mask", sample.loss_mask},
              {"logprobs", scores.logprob},
              {"entropies", scores.entropy},
              {"logprob_sum", sum},
              {"tokens", count},
              {"perplexity", count > 0 ? Json(std::exp(-sum / static_cast<double>(count))) : Json()}};
    std::ostream& out = file_.is_open() ? static_cast<std::ostream&>(file_) : std::cout;
    out << line.dump() << '\n';
    out.flush();
    if (!out)
      throw BadData("{}: writing failed; is the disk full?", path_.empty() ? "standard output" : path_);
    sum_ += sum;
    count_ += count;
  }
  void summary() const {
    if (count_ == 0) return;
    const double n = static_cast<double>(count_);
    std::cerr << fmt::format("{} tokens, mean log-prob {:.6f}, perplexity {:.4f}\n", count_, sum_ / n,
                             std::exp(-sum_ / n));
  }

 private:
  std::string path_;
  std::ofstream file_;
  double sum_ = 0;
  int64_t count_ = 0, records_ = 0;
};

bool same_file(const std::string& a, const std::string& b) {
  std::error_code error;
  return std::filesystem::equivalent(a, b, error) && !error;
}

// Texts of the command line, or those of a file.
struct Records {
  std::vector<Sample> given;
  std::optional<Dataset> data;

  int64_t size() const { return data ? data->size() : static_cast<int64_t>(given.size()); }
  Sample sample(int64_t i) const { return data ? data->sample(i) : given.at(static_cast<size_t>(i)); }
  int64_t longest() const {
    int64_t longest = data ? data->summary().longest : 0;
    for (const Sample& sample : given) longest = std::max(longest, sample.size());
    return longest;
  }
  std::string fingerprint() const {
    return fmt::format("{} records, {:016x}", size(), data ? data->fingerprint() : 0);
  }
};

Records read_records(const Flags& flags, const TextTools& text, int64_t vocab_size) {
  Records records;
  if (!flags.texts.empty()) {
    if (!text.tokenizer)
      throw BadConfig("{}: tokenizer.json is missing, --text cannot be tokenised", flags.folder);
    for (const std::string& t : flags.texts) {
      const MaskedTokens tokens = tokenize_text(*text.tokenizer, t, {.append_eos = false});
      Sample sample;
      sample.ids.assign(tokens.ids.begin(), tokens.ids.end());
      sample.loss_mask = tokens.loss_mask;
      if (sample.ids.empty()) throw BadData("--text '{}': no token", t);
      records.given.push_back(std::move(sample));
    }
    return records;
  }
  DataOptions options;
  options.files = {flags.file};
  options.form = record_form_from(flags.format);
  options.vocab_size = vocab_size;
  options.max_tokens = flags.max_tokens;
  options.max_tokens_key = "--max-tokens";
  options.append_eos = false;
  records.data = Dataset::load(options, text.tokenizer ? &*text.tokenizer : nullptr,
                               text.chat_template ? &*text.chat_template : nullptr);
  return records;
}

void check_flags(const Flags& flags) {
  if (flags.file.empty() == flags.texts.empty())
    throw BadConfig("score: give a JSONL file, or --text, and not both");
  if (!(flags.temperature >= std::numeric_limits<float>::min() &&
        flags.temperature <= std::numeric_limits<float>::max())) {
    throw BadConfig("--temperature = {}: allowed: a number > 0 that float32 can hold", flags.temperature);
  }
  if (!flags.file.empty() && same_file(flags.output, flags.file))
    throw BadConfig("--output {}: is the file to score; give another one", flags.output);
}

int run_score(const Flags& flags, const TrainConfig& config, const std::shared_ptr<World>& world) {
  Log log(log_of(*world, LogLevel::kWarning));
  const Group& all = world->all();
  const bool leads = world->rank() == 0;
  const TextTools text = agreed(all, [&] { return load_text_tools(flags.folder, ""); });
  Session session = open_session(flags.folder, config, log, /*load_weights=*/true, world);

  const Records records =
      agreed(all, [&] { return read_records(flags, text, session.spec.config.vocab_size); });
  agree_on(all, "what is scored", records.fingerprint());
  const int64_t positions = session.spec.config.max_position_embeddings;
  const int64_t longest = records.longest();
  if (positions > 0 && longest > positions) {
    log.warn(
        "the longest record has {} tokens, the model was made for {} (max_position_embeddings of its "
        "config.json)",
        longest, positions);
  }
  std::optional<Writer> writer;
  agree(all, [&] {
    if (leads) writer.emplace(flags.output);
  });
  constexpr int64_t kGroup = 256;  // records packed together: bounds memory, and results appear as they come
  for (int64_t begin = 0; begin < records.size(); begin += kGroup) {
    std::vector<Sample> group;
    for (int64_t i = begin; i < std::min(begin + kGroup, records.size()); ++i) {
      group.push_back(records.sample(i));
      group.back().temperature = flags.temperature;
    }
    const auto scores = score_samples(*session.step, group, flags.max_tokens, "--max-tokens");
    agree(all, [&] {
      for (size_t i = 0; writer && i < group.size(); ++i) writer->write(group[i], scores[i]);
    });
  }
  if (writer) writer->summary();
  return 0;
}

}  // namespace

void add_score(CLI::App& app, Run& run) {
  auto flags = std::make_shared<Flags>();
  CLI::App* command =
      app.add_subcommand("score", "per-token log-probs and entropies of texts, chats or ids, as JSON lines");
  command->add_option("dir", flags->folder, "the model's Hugging Face folder")
      ->required()
      ->check(not_empty());
  command->add_option("file", flags->file,
                      "JSONL: messages, prompt/response, text, or input_ids (+ loss_mask)");
  command->add_option("--text", flags->texts, "a text instead of a file; may be repeated")
      ->allow_extra_args(false);
  command->add_option("--format", flags->format, "of the records")
      ->check(CLI::IsMember({"auto", "messages", "prompt_response", "text", "input_ids"}))
      ->capture_default_str();
  command->add_option("-o,--output", flags->output, "where the JSON lines go; standard output if not given")
      ->check(not_empty());
  command->add_option("--temperature", flags->temperature)->capture_default_str();
  command->add_option("--max-tokens", flags->max_tokens, "longest record, and tokens of a micro-batch")
      ->check(CLI::Range(int64_t{1}, kMostCount))
      ->capture_default_str();
  command->add_option("--dtype", flags->dtype)
      ->check(CLI::IsMember({"float32", "float64", "bfloat16"}))
      ->capture_default_str();
  command->footer(
      "logprobs[i] and entropies[i] belong to input_ids[i]; the first token of a record is given and has 0. "
      "perplexity is over tokens whose loss_mask is 1.  Keys of `titanium train` are taken too, e.g. "
      "--parallelism.tensor_parallel_degree=2 under `titanium launch`.");
  command->allow_extras();
  command->callback([flags, command, &run] {
    run = [flags, command] {
      check_flags(*flags);
      const TrainConfig config = command_config(flags->dtype, command->remaining());
      return on_ranks(config.comm, [&](const auto& world) { return run_score(*flags, config, world); });
    };
  });
}

}  // namespace titanium

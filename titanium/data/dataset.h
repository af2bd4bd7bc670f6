// Records of JSONL files as tokens, read and checked once at the start.
#pragma once
#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "titanium/batch/sample.h"
#include "titanium/data/record.h"
#include "titanium/data/token_store.h"
#include "titanium/text/chat_mask.h"
#include "titanium/text/tokenizer.h"

namespace titanium {

enum class OnLong { kFail, kTruncate, kDrop };
enum class OnBad { kFail, kSkip };
OnLong on_long_from(std::string_view name);  // "fail", "truncate", "drop"; BadConfig
OnBad on_bad_from(std::string_view name);    // "fail", "skip"; BadConfig

struct DataOptions {
  std::vector<std::string> files;  // in this order; a record's number counts through all of them
  RecordForm form = RecordForm::kAuto;
  int64_t vocab_size = 0;                     // of the model: every id is below; 0 takes the tokenizer's
  int64_t max_tokens = 0;                     // longest record, 0 for no limit
  std::string max_tokens_key = "max_tokens";  // its config key, for messages
  OnLong on_long = OnLong::kFail;             // kTruncate keeps the first max_tokens tokens
  OnBad on_bad = OnBad::kFail;                // kSkip counts the record and goes on
  bool append_eos = true;                     // to text and prompt/response records
  ChatMaskPolicy mask;                        // of messages; a prompt list trains its response alone
  ChatJson template_variables = ChatJson::object();  // further variables of the chat template
  uint64_t seed = 0;
  double validation_split = 0;  // [0, 1): share of records kept out of training
  int threads = 0;              // 0: as many as the machine has
};

// What was read.  Counts are of records unless named otherwise.
struct DataSummary {
  int64_t lines = 0;                         // records in the files
  int64_t records = 0;                       // kept
  int64_t truncated = 0;                     // of those kept
  int64_t untrained = 0;                     // of those kept: no token with loss
  std::array<int64_t, kRejects> rejected{};  // not kept, by reason
  std::string first_rejected;                // message of the first of them
  int64_t tokens = 0;                        // of kept records
  int64_t trained = 0;         // tokens with loss: a trained token with a position to predict it
  int64_t longest = 0;         // tokens of the longest kept record
  int64_t dropped_tokens = 0;  // cut off by truncation
  int64_t dropped_bytes = 0;   // text for which the vocabulary has no token
  std::string text() const;    // for the log, "x of y tokens have loss" and every count that is not 0
};

// Processes that read one data set together: each reads a part of the records, and all hold all of them.
struct Readers {
  int rank = 0, size = 1;
  // Bytes of every reader, by rank, at all of them; called by all, in the same order.  None for one.
  std::function<std::vector<std::string>(const std::string& mine)> exchange;
};

class Dataset {
 public:
  // Reads, tokenises and checks all records, in parallel.  tokenizer may be null for input_ids (then
  // vocab_size is needed), chat_template for data without messages; a record that needs the missing one is a
  // BadConfig. BadData: the first bad record (OnBad::kFail), an over-long one (OnLong::kFail), no record
  // left, or a split that leaves training or validation empty.  Same files and options, same data set,
  // whatever the number of threads and of readers; with several the error is the same on all.  BadConfig
  // names a reader whose files are others.
  static Dataset load(const DataOptions& options, const Tokenizer* tokenizer,
                      const ChatTemplate* chat_template, const Readers& readers = {});

  int64_t size() const { return store_.size(); }
  int64_t length(int64_t record) const { return store_.length(record); }  // tokens
  Sample sample(int64_t record) const { return store_.sample(record); }   // index 0, temperature 1

  // Records of each part, ascending.  A record's part is a function of (seed, the bytes of its line): equal
  // lines are never in both parts, and adding records moves no other.
  const std::vector<int64_t>& train() const { return train_; }
  const std::vector<int64_t>& validation() const { return validation_; }

  const DataSummary& summary() const { return summary_; }
  // Changes with any token, mask bit, the order of records or the part that one is in: a resumed run can tell
  // that its data are others.
  uint64_t fingerprint() const { return fingerprint_; }
  int64_t memory_bytes() const;  // held by the tokens, masks and indices

 private:
  TokenStore store_;
  std::vector<int64_t> train_, validation_;
  DataSummary summary_;
  uint64_t fingerprint_ = 0;
};

}  // namespace titanium

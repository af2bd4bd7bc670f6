#include "titanium/data/dataset.h"

#include <algorithm>
#include <atomic>
#include <charconv>
#include <cstring>
#include <exception>
#include <limits>
#include <numeric>
#include <optional>
#include <thread>
#include <utility>

#include "titanium/base/random.h"
#include "titanium/data/encode.h"
#include "titanium/data/jsonl.h"
#include "titanium/formats/json.h"

namespace titanium {
namespace {

constexpr int64_t kChunk = 128;  // records that a thread reads at a time

// A run of records of one file, and what became of it.
struct Chunk {
  const JsonlFile* file;
  int64_t begin, end;
  TokenBlock tokens;
  std::vector<char> validation;  // of each kept record
  std::vector<uint64_t> hashes;  // of each kept record's tokens and mask
  DataSummary summary;
  std::exception_ptr error;  // of the first record that ends the reading; later ones are not read
};

uint64_t hash_of(const EncodedRecord& record) {
  const uint64_t parts[] = {
      hash_name(reinterpret_cast<const char*>(record.ids.data()), record.ids.size() * sizeof(int32_t)),
      hash_name(reinterpret_cast<const char*>(record.loss_mask.data()), record.loss_mask.size()),
  };
  return hash_name(reinterpret_cast<const char*>(parts), sizeof(parts));
}

void reject(DataSummary& summary, Reject reason, const std::string& message) {
  if (summary.first_rejected.empty()) summary.first_rejected = message;
  ++summary.rejected[static_cast<size_t>(reason)];
}

void read_record(const DataOptions& options, const Encoder& encoder, int64_t i, Chunk& chunk) {
  const std::string_view line = chunk.file->line(i);
  const std::string where = chunk.file->where(i);
  DataSummary& summary = chunk.summary;
  EncodedRecord record;
  ++summary.lines;
  try {
    record = encoder.encode(parse_record(line, options.form, encoder.vocab_size, where), where);
  } catch (const BadRecord& e) {
    if (options.on_bad == OnBad::kFail) throw;
    reject(summary, e.reason(), e.what());
    return;
  }
  const auto tokens = static_cast<int64_t>(record.ids.size());
  if (options.max_tokens > 0 && tokens > options.max_tokens) {
    if (options.on_long == OnLong::kTruncate) {
      ++summary.truncated;
      summary.dropped_tokens += tokens - options.max_tokens;
      record.ids.resize(static_cast<size_t>(options.max_tokens));
      record.loss_mask.resize(static_cast<size_t>(options.max_tokens));
    } else {
      const BadRecord too_long(Reject::kLength,
                               fmt::format("{}: the record has {} tokens, more than {} = {}", where, tokens,
                                           options.max_tokens_key, options.max_tokens));
      if (options.on_long == OnLong::kFail) throw too_long;
      reject(summary, Reject::kLength, too_long.what());
      return;
    }
  }
  const auto kept = static_cast<int64_t>(record.ids.size());
  const auto trained =
      std::count_if(record.loss_mask.begin() + 1, record.loss_mask.end(), [](uint8_t m) { return m != 0; });
  ++summary.records;
  summary.untrained += trained == 0;
  summary.tokens += kept;
  summary.trained += trained;
  summary.longest = std::max(summary.longest, kept);
  summary.dropped_bytes += record.dropped_bytes;
  chunk.tokens.add(record.ids, record.loss_mask);
  chunk.hashes.push_back(hash_of(record));
  const Random random(options.seed, Purpose::kSplit, hash_name(line.data(), line.size()));
  chunk.validation.push_back(random.uniform(0) < options.validation_split);
}

void add(DataSummary& to, const DataSummary& from) {
  to.lines += from.lines;
  to.records += from.records;
  to.truncated += from.truncated;
  to.untrained += from.untrained;
  for (size_t r = 0; r < from.rejected.size(); ++r) to.rejected[r] += from.rejected[r];
  if (to.first_rejected.empty()) to.first_rejected = from.first_rejected;
  to.tokens += from.tokens;
  to.trained += from.trained;
  to.longest = std::max(to.longest, from.longest);
  to.dropped_tokens += from.dropped_tokens;
  to.dropped_bytes += from.dropped_bytes;
}

void check(const DataOptions& options, const Tokenizer* tokenizer) {
  if (options.files.empty()) throw BadConfig("no data file is given");
  if (!(options.validation_split >= 0 && options.validation_split < 1)) {
    throw BadConfig("data.validation_split = {}: allowed: a number in [0, 1)", options.validation_split);
  }
  if (options.max_tokens < 0)
    throw BadConfig("{} = {}: allowed: >= 0", options.max_tokens_key, options.max_tokens);
  if (options.threads < 0) throw BadConfig("threads = {}: allowed: >= 0", options.threads);
  if (options.vocab_size < 0 || options.vocab_size > std::numeric_limits<int32_t>::max()) {
    throw BadConfig("a vocabulary of {} ids is out of range", options.vocab_size);
  }
  if (options.vocab_size == 0 && !tokenizer) {
    throw BadConfig("the data need a tokenizer or the size of the vocabulary");
  }
}

// Reads this reader's chunks.  Of errors the first in the order of the files is kept, whatever thread met one
// first: its chunk is returned, or the number of chunks where there is none.
size_t read_all(const DataOptions& options, const Encoder& encoder, const Readers& readers,
                std::vector<Chunk>& chunks) {
  std::atomic<size_t> next{static_cast<size_t>(readers.rank)};
  std::atomic<size_t> first_error{chunks.size()};
  const auto work = [&] {
    while (true) {
      const size_t c = next.fetch_add(static_cast<size_t>(readers.size));
      if (c >= chunks.size() || c > first_error) return;
      Chunk& chunk = chunks[c];
      try {
        for (int64_t i = chunk.begin; i < chunk.end; ++i) read_record(options, encoder, i, chunk);
        chunk.tokens.shrink();
      } catch (...) {
        chunk.error = std::current_exception();
        size_t known = first_error;
        while (c < known && !first_error.compare_exchange_weak(known, c)) {
        }
      }
    }
  };
  size_t threads = options.threads > 0 ? static_cast<size_t>(options.threads)
                                       : std::max(1u, std::thread::hardware_concurrency());
  threads = std::min(threads, chunks.size());
  {
    std::vector<std::jthread> helpers;
    for (size_t t = 1; t < threads; ++t) helpers.emplace_back(work);
    work();
  }
  return first_error;
}

// Work that may fail on one reader alone; then all throw the same error, the one of the least `where`.
void agree(const Readers& readers, const std::function<void()>& work, size_t where = 0) {
  if (readers.size == 1) return work();
  Json mine;
  const auto failed = [&](ErrorKind kind, const char* message) {
    mine = {{"where", where}, {"kind", static_cast<int>(kind)}, {"message", message}};
  };
  try {
    work();
  } catch (const Error& e) {
    failed(e.kind(), e.what());
  } catch (const std::exception& e) {
    failed(ErrorKind::kBug, e.what());
  }
  Json first;
  for (const std::string& text :
       readers.exchange(mine.dump(-1, ' ', false, Json::error_handler_t::replace))) {
    const Json one = Json::parse(text);
    if (!one.is_null() && (first.is_null() || one["where"].get<size_t>() < first["where"].get<size_t>()))
      first = one;
  }
  if (!first.is_null()) throw_error(static_cast<ErrorKind>(first["kind"].get<int>()), first["message"]);
}

// Of all records, eight bytes at a time: each reader reads a part of them, from a file of its own host maybe.
uint64_t content_hash(const JsonlFile& file) {
  uint64_t hash = 0;
  for (int64_t record = 0; record < file.size(); ++record) {
    std::string_view line = file.line(record);
    hash += line.size();
    for (; line.size() >= sizeof hash; line.remove_prefix(sizeof hash)) {
      uint64_t word = 0;
      std::memcpy(&word, line.data(), sizeof word);
      hash = (hash ^ word) * 0x9E3779B97F4A7C15u;
      hash ^= hash >> 32;
    }
    hash = (hash ^ hash_name(line.data(), line.size())) * 0x9E3779B97F4A7C15u;
  }
  return hash;
}

void check_equal(const Readers& readers, const std::vector<JsonlFile>& files) {
  std::string mine;
  for (const JsonlFile& file : files) {
    mine +=
        fmt::format("{} bytes, {} records, hash {:016x}; ", file.bytes(), file.size(), content_hash(file));
  }
  const std::vector<std::string> all = readers.exchange(mine);
  for (size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank] == all[0]) continue;
    throw BadConfig("the data files of rank {} are not those of rank 0: {}against {}", rank, all[rank],
                    all[0]);
  }
}

std::string bytes_of(const Chunk& chunk) {
  const DataSummary& s = chunk.summary;
  const Json json = {{"validation", chunk.validation},
                     {"hashes", chunk.hashes},
                     {"rejected", s.rejected},
                     {"first_rejected", s.first_rejected},
                     {"counts",
                      {s.lines, s.records, s.truncated, s.untrained, s.tokens, s.trained, s.longest,
                       s.dropped_tokens, s.dropped_bytes}}};
  const std::string text = json.dump(-1, ' ', false, Json::error_handler_t::replace);
  return fmt::format("{}\n{}", text, chunk.tokens.bytes());  // no line ends in the JSON
}

void fill(Chunk& chunk, std::string_view bytes) {
  const size_t end = bytes.find('\n');
  if (end == bytes.npos) throw Bug("a chunk of another reader has no end");
  const Json json = Json::parse(bytes.substr(0, end));
  chunk.validation = json.at("validation").get<std::vector<char>>();
  chunk.hashes = json.at("hashes").get<std::vector<uint64_t>>();
  DataSummary& s = chunk.summary;
  s.rejected = json.at("rejected").get<std::array<int64_t, kRejects>>();
  s.first_rejected = json.at("first_rejected").get<std::string>();
  const auto counts = json.at("counts").get<std::array<int64_t, 9>>();
  size_t next = 0;
  for (int64_t* count : {&s.lines, &s.records, &s.truncated, &s.untrained, &s.tokens, &s.trained, &s.longest,
                         &s.dropped_tokens, &s.dropped_bytes})
    *count = counts[next++];
  chunk.tokens = TokenBlock::from(bytes.substr(end + 1));
}

// Gives every reader the chunks of the others, a few at a time.
void share(const Readers& readers, std::vector<Chunk>& chunks) {
  constexpr size_t kAtOnce = 64;  // of each reader
  const auto size = static_cast<size_t>(readers.size);
  for (size_t begin = 0; begin < chunks.size(); begin += kAtOnce * size) {
    const size_t end = std::min(chunks.size(), begin + kAtOnce * size);
    std::string mine;
    for (size_t c = begin + static_cast<size_t>(readers.rank); c < end; c += size) {
      const std::string bytes = bytes_of(chunks[c]);
      mine += fmt::format("{}\n{}", bytes.size(), bytes);
    }
    const std::vector<std::string> all = readers.exchange(mine);
    for (size_t rank = 0; rank < size; ++rank) {
      if (rank == static_cast<size_t>(readers.rank)) continue;
      std::string_view left = all[rank];
      for (size_t c = begin + rank; c < end; c += size) {
        const size_t line = left.find('\n');
        size_t bytes = 0;
        if (line == left.npos ||
            std::from_chars(left.data(), left.data() + line, bytes).ptr != left.data() + line ||
            bytes > left.size() - line - 1)
          throw Bug("the chunks of rank {} end too early", rank);
        fill(chunks[c], left.substr(line + 1, bytes));
        left.remove_prefix(line + 1 + bytes);
      }
    }
  }
}

}  // namespace

OnLong on_long_from(std::string_view name) {
  if (name == "fail") return OnLong::kFail;
  if (name == "truncate") return OnLong::kTruncate;
  if (name == "drop") return OnLong::kDrop;
  throw BadConfig("'{}' does not say what becomes of a long record; allowed: fail, truncate, drop", name);
}

OnBad on_bad_from(std::string_view name) {
  if (name == "fail") return OnBad::kFail;
  if (name == "skip") return OnBad::kSkip;
  throw BadConfig("'{}' does not say what becomes of a bad record; allowed: fail, skip", name);
}

std::string DataSummary::text() const {
  std::string out = fmt::format(
      "{} of {} records, {} of {} tokens have loss ({:.1f} %), longest record {}", records, lines, trained,
      tokens, tokens > 0 ? 100.0 * static_cast<double>(trained) / static_cast<double>(tokens) : 0.0, longest);
  if (truncated > 0) out += fmt::format("; {} records truncated by {} tokens", truncated, dropped_tokens);
  if (untrained > 0) out += fmt::format("; {} records have no token with loss", untrained);
  if (dropped_bytes > 0)
    out += fmt::format("; {} bytes of text have no token in the vocabulary", dropped_bytes);
  const int64_t left_out = std::accumulate(rejected.begin(), rejected.end(), int64_t{0});
  if (left_out > 0) {
    std::string reasons;
    for (size_t r = 0; r < rejected.size(); ++r) {
      if (rejected[r] == 0) continue;
      reasons +=
          fmt::format("{}{} {}", reasons.empty() ? "" : ", ", name(static_cast<Reject>(r)), rejected[r]);
    }
    out += fmt::format("; {} records left out ({}), the first: {}", left_out, reasons, first_rejected);
  }
  return out;
}

Dataset Dataset::load(const DataOptions& options, const Tokenizer* tokenizer,
                      const ChatTemplate* chat_template, const Readers& readers) {
  check(options, tokenizer);
  const Encoder encoder{.tokenizer = tokenizer,
                        .chat_template = chat_template,
                        .append_eos = options.append_eos,
                        .mask = options.mask,
                        .template_variables = options.template_variables,
                        .vocab_size = options.vocab_size > 0 ? options.vocab_size : tokenizer->vocab_size()};
  std::vector<JsonlFile> files;
  std::string names;
  size_t bytes = 0;
  agree(readers, [&] {
    for (const std::string& path : options.files) {
      bytes += files.emplace_back(path).bytes();
      names += (names.empty() ? "" : ", ") + path;
    }
  });
  if (readers.size > 1) check_equal(readers, files);
  std::vector<Chunk> chunks;
  for (const JsonlFile& file : files) {
    for (int64_t begin = 0; begin < file.size(); begin += kChunk) {
      Chunk& chunk = chunks.emplace_back();
      chunk.file = &file;
      chunk.begin = begin;
      chunk.end = std::min(begin + kChunk, file.size());
    }
  }
  const size_t bad = read_all(options, encoder, readers, chunks);
  agree(
      readers,
      [&] {
        if (bad < chunks.size()) std::rethrow_exception(chunks[bad].error);
      },
      bad);
  if (readers.size > 1) share(readers, chunks);

  Dataset data;
  uint64_t fingerprint = 0;
  for (Chunk& chunk : chunks) {
    for (size_t r = 0; r < chunk.hashes.size(); ++r) {
      const uint64_t parts[] = {fingerprint, chunk.hashes[r], chunk.validation[r] ? uint64_t{1} : 0};
      fingerprint = hash_name(reinterpret_cast<const char*>(parts), sizeof(parts));
      const int64_t record = data.size() + static_cast<int64_t>(r);
      (chunk.validation[r] ? data.validation_ : data.train_).push_back(record);
    }
    add(data.summary_, chunk.summary);
    data.store_.append(std::move(chunk.tokens));
  }
  data.fingerprint_ = fingerprint;
  if (data.size() == 0) {
    const std::string why = data.summary_.lines == 0
                                ? fmt::format("the data have no records (size: {} bytes)", bytes)
                                : fmt::format("no record is left: {}", data.summary_.text());
    throw BadData("{}: {}", names, why);
  }
  if (data.train_.empty() || (options.validation_split > 0 && data.validation_.empty())) {
    throw BadData("{}: data.validation_split = {} of {} records leaves {} to train and {} to validate", names,
                  options.validation_split, data.size(), data.train_.size(), data.validation_.size());
  }
  return data;
}

int64_t Dataset::memory_bytes() const {
  return store_.memory_bytes() +
         static_cast<int64_t>((train_.capacity() + validation_.capacity()) * sizeof(int64_t));
}

}  // namespace titanium

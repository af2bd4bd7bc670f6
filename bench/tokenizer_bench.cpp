// Encodes a text with titanium's tokenizer on one core and prints MB/s; with a Python that has Hugging Face's
// tokenizers, the same text in the same run with that, in alternation.
//   bench_tokenizer TOKENIZER_JSON TEXT_FILE [PYTHON]
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

#include "titanium/base/error.h"
#include "titanium/formats/json.h"
#include "titanium/text/tokenizer.h"

namespace {

using titanium::BadConfig;

constexpr int kRounds = 3;
constexpr size_t kMaxBytes = 16 << 20;

// WordNet's data files: keep the glosses, which are English.  Other files are taken whole.
std::vector<std::string> documents(const std::string& path) {
  const std::string bytes = titanium::read_file(path);
  std::vector<std::string> out;
  std::istringstream lines(bytes);
  std::string line, document;
  size_t total = 0;
  while (std::getline(lines, line) && total < kMaxBytes) {
    const size_t bar = line.find(" | ");
    document += bar == std::string::npos ? line : line.substr(bar + 3);
    document += '\n';
    if (document.size() < 4096) continue;
    total += document.size();
    out.push_back(std::move(document));
    document.clear();
  }
  if (!document.empty()) out.push_back(document);
  return out;
}

double seconds_of(const auto& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

std::string quoted(const std::string& text) {
  std::string out = "'";
  for (const char c : text) out += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return out + "'";
}

// The peer reads the documents from a file of JSON strings and prints seconds and tokens.
std::pair<double, long> peer(const std::string& python, const std::string& tokenizer,
                             const std::string& texts) {
  const std::string script =
      "import json, sys, time\n"
      "from tokenizers import Tokenizer\n"
      "t = Tokenizer.from_file(sys.argv[1])\n"
      "d = [json.loads(l) for l in open(sys.argv[2], encoding='utf-8')]\n"
      "s = time.perf_counter()\n"
      "n = sum(len(t.encode(x).ids) for x in d)\n"
      "print(time.perf_counter() - s, n)\n";
  const std::string command = "TOKENIZERS_PARALLELISM=false " + quoted(python) + " -c " + quoted(script) +
                              " " + quoted(tokenizer) + " " + quoted(texts);
  FILE* pipe = ::popen(command.c_str(), "r");
  double seconds = 0;
  long tokens = 0;
  const bool read = pipe && std::fscanf(pipe, "%lf %ld", &seconds, &tokens) == 2;
  if (pipe) ::pclose(pipe);
  if (!read) throw BadConfig("{}: the peer failed", python);
  return {seconds, tokens};
}

int run(int argc, char** argv) {
  if (argc < 3) throw BadConfig("usage: bench_tokenizer TOKENIZER_JSON TEXT_FILE [PYTHON]");
  const titanium::Tokenizer tokenizer = titanium::Tokenizer::from_file(argv[1]);
  const std::vector<std::string> texts = documents(argv[2]);
  double megabytes = 0;
  for (const std::string& text : texts) megabytes += static_cast<double>(text.size()) / 1e6;
  std::string file;
  if (argc > 3) {
    file = (std::filesystem::temp_directory_path() /
            ("tokenizer_bench." + std::to_string(::getpid()) + ".jsonl"))
               .string();
    std::ofstream out(file);
    for (const std::string& text : texts) out << titanium::Json(text).dump() << '\n';
  }
  std::vector<double> ours, theirs;
  for (int round = 0; round < kRounds; ++round) {
    size_t tokens = 0;
    const double seconds = seconds_of([&] {
      for (const std::string& text : texts) tokens += tokenizer.encode(text).ids.size();
    });
    ours.push_back(megabytes / seconds);
    std::printf("titanium: %.2f MB, %zu tokens, %.2f MB/s\n", megabytes, tokens, ours.back());
    if (file.empty()) continue;
    const auto [peer_seconds, peer_tokens] = peer(argv[3], argv[1], file);
    theirs.push_back(megabytes / peer_seconds);
    std::printf("tokenizers: %ld tokens, %.2f MB/s\n", peer_tokens, theirs.back());
    if (peer_tokens != static_cast<long>(tokens)) throw BadConfig("the token counts differ");
  }
  auto median = [](std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
  };
  if (!file.empty()) {
    std::remove(file.c_str());
    std::printf("tokenizer ours %.2f peer %.2f ratio %.2f MB/s\n", median(ours), median(theirs),
                median(ours) / median(theirs));
  } else {
    std::printf("tokenizer ours %.2f MB/s\n", median(ours));
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const titanium::Error& error) {
    std::fprintf(stderr, "%s: %s\n", titanium::name(error.kind()), error.what());
    return titanium::exit_code(error.kind());
  }
}

// Weight sync beside memcpy in the same process, in turns.
//   bench_sync MODEL [ROUNDS] [BUCKET_MB]
// Masters are fp32, the stream is bf16.  What is counted on both sides are the bytes of the output: those of
// the bf16 tensors that the stream hands out, and those that memcpy copies from one bf16 image of the model
// to another, both warm.  So for each byte that is counted the stream moves three (two of a master are read,
// one is written), memcpy two.  A round of the stream is all of it: from the call of get_per_tensor_param
// until next() has given nothing, fresh memory for the buckets included.  Nothing leaves the process, so
// "stream" makes no checksums. The last line is one JSON object, in GB/s.
#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <thread>

#include "bench/timing.h"
#include "titanium/weights/hf_load.h"
#include "titanium/weights/sync.h"

using namespace titanium;

namespace {

// By `threads` at once, each a part of it.
void copy(std::byte* to, const std::byte* from, size_t bytes, int threads) {
  std::vector<std::thread> helpers;
  const size_t part = bytes / static_cast<size_t>(threads);
  for (int i = 1; i < threads; ++i)
    helpers.emplace_back(
        [=] { std::memcpy(to + part * i, from + part * i, i + 1 == threads ? bytes - part * i : part); });
  std::memcpy(to, from, threads == 1 ? bytes : part);
  for (std::thread& helper : helpers) helper.join();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    fmt::print("usage: bench_sync MODEL [ROUNDS] [BUCKET_MB]\n");
    return 2;
  }
  const int rounds = argc > 2 ? std::atoi(argv[2]) : 9;
  SyncOptions options;
  if (argc > 3) options.bucket_bytes = static_cast<uint64_t>(std::atoll(argv[3])) << 20;
  const int threads = at::get_num_threads();

  const HfTensors tensors(argv[1]);
  WeightTable table;
  const Weight* embed = nullptr;
  for (const std::string& name : tensors.names()) {
    const Weight* weight = table.add(name, tensors.at(name).shape, Split::kWhole, {}, 0);
    if (name == "model.embed_tokens.weight") embed = weight;
  }
  if (embed != nullptr && table.find("lm_head.weight") == nullptr) table.share(embed, 1);
  ParamStore store(table, 2, {});
  load_hf(tensors, store);

  uint64_t bytes = 0;
  const auto stream = [&](bool checksums) {
    options.checksums = checksums;
    TensorStream stream = get_per_tensor_param(store, options);
    bytes = 0;
    while (const auto tensor = stream.next()) bytes += tensor->tensor.nbytes();
  };
  stream(true);
  std::vector<std::byte> from(bytes, std::byte{1}), to(bytes, std::byte{2});
  std::vector<double> plain, checked, memcpy_all, memcpy_one;
  for (int round = 0; round < rounds; ++round) {
    checked.push_back(seconds([&] { stream(true); }));
    memcpy_all.push_back(seconds([&] { copy(to.data(), from.data(), bytes, threads); }));
    plain.push_back(seconds([&] { stream(false); }));
    memcpy_one.push_back(seconds([&] { copy(to.data(), from.data(), bytes, 1); }));
  }
  const auto rate = [&](const std::vector<double>& times) {
    return static_cast<double>(bytes) / median(times) / 1e9;
  };
  fmt::print(
      "{{\"bytes\": {}, \"threads\": {}, \"stream\": {:.3f}, \"stream_with_checksums\": {:.3f}, "
      "\"memcpy\": {:.3f}, \"memcpy_one_thread\": {:.3f}}}\n",
      bytes, threads, rate(plain), rate(checked), rate(memcpy_all), rate(memcpy_one));
}

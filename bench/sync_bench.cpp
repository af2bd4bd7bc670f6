// Weight sync beside memcpy in the same process, in turns.
//   bench_sync MODEL [ROUNDS] [BUCKET_MB]
// Masters are fp32, the stream is bf16; what is counted on all sides are the bytes of the bf16 tensors.
//   delivered  after an update (the optimizer left the cast of the weights): the consumer copies each tensor
//   that
//              the stream hands out into its own memory; beside it "memcpy", which does the same copies,
//              tensor by tensor, from one bf16 image of the model to another
//   cast       from masters that nothing has cast yet (after a load or an offload), to a consumer that only
//   looks:
//              for each byte that is counted the stream moves three, memcpy two
//   checked    the same in buckets with checksums, as they are made for a socket
// A round of a stream is all of it: from the call of get_per_tensor_param until next() has given nothing,
// fresh memory for the buckets included.  Copies are by one thread, or by all, whichever is faster for
// memcpy.  The last line is one JSON object, in GB/s.
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
  StoreOptions store_options;
  store_options.dtypes.compute = at::kBFloat16;
  ParamStore store(table, 2, store_options);
  load_hf(tensors, store);

  uint64_t bytes = 0;
  for (const auto& weight : table.weights()) bytes += static_cast<uint64_t>(weight->numel()) * 2;
  std::vector<std::byte> from(bytes, std::byte{1}), to(bytes, std::byte{2});
  const auto cast = [&](bool checksums) {
    for (const auto& unit : store.units()) unit->written();
    return seconds([&] {
      options.checksums = checksums;
      if (checksums) {
        BucketStream stream = get_per_tensor_param(store, options).into_buckets();
        while (stream.next()) {
        }
      } else {
        TensorStream stream = get_per_tensor_param(store, options);
        while (stream.next()) {
        }
      }
    });
  };
  const auto delivered = [&](int by) {
    for (const auto& unit : store.units()) unit->unshard();  // an update would have left it so
    return seconds([&] {
      size_t at = 0;
      TensorStream stream = get_per_tensor_param(store, options);
      while (const auto tensor = stream.next()) {
        const size_t size = tensor->tensor.nbytes();
        copy(to.data() + at, static_cast<const std::byte*>(tensor->tensor.const_data_ptr()), size, by);
        at += size;
      }
    });
  };
  const auto copied = [&](int by) {
    return seconds([&] {
      size_t at = 0;
      for (const auto& weight : table.weights()) {
        const size_t size = static_cast<size_t>(weight->numel()) * 2;
        copy(to.data() + at, from.data() + at, size, by);
        at += size;
      }
    });
  };
  std::vector<double> plain, checked, ours_one, ours_all, theirs_one, theirs_all;
  cast(true);
  delivered(1);
  for (int round = 0; round < rounds; ++round) {
    ours_one.push_back(delivered(1));
    theirs_one.push_back(copied(1));
    ours_all.push_back(delivered(threads));
    theirs_all.push_back(copied(threads));
    plain.push_back(cast(false));
    checked.push_back(cast(true));
  }
  const auto rate = [&](const std::vector<double>& times) {
    return static_cast<double>(bytes) / median(times) / 1e9;
  };
  const bool all = rate(theirs_all) > rate(theirs_one);
  fmt::print(
      "{{\"bytes\": {}, \"threads\": {}, \"copying_threads\": {}, \"delivered\": {:.3f}, \"memcpy\": {:.3f}, "
      "\"cast\": {:.3f}, \"checked\": {:.3f}}}\n",
      bytes, threads, all ? threads : 1, rate(all ? ours_all : ours_one), rate(all ? theirs_all : theirs_one),
      rate(plain), rate(checked));
}

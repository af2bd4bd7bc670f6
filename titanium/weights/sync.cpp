#include "titanium/weights/sync.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <fmt/ranges.h>
#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "titanium/base/error.h"
#include "titanium/dist/agree.h"
#include "titanium/shard/buffer.h"
#include "titanium/weights/crew.h"
#include "titanium/weights/gather.h"
#include "titanium/weights/hash.h"
#include "titanium/weights/scalar_type.h"
#include "titanium/weights/sync_wire.h"

namespace titanium {
namespace {

constexpr const char* kHead = "lm_head.weight";
constexpr int kMostThreads = 1024;
constexpr uint64_t kPiece = 64 * kHashLeaf;  // bytes of output that a thread makes at a time

struct Source {
  const Weight* weight;
  std::vector<Slice> own;
  at::Tensor ready;  // [numel] in the dtype of the stream, where this process has it; undefined elsewhere
};

struct BucketPlan {
  std::vector<size_t> tensors;    // of the stream
  std::vector<uint64_t> offsets;  // of those
  uint64_t bytes = 0;
  bool oversize = false;  // one tensor that is larger than a bucket
};

// A bucket and its memory.
struct Filled {
  at::Tensor buffer;
  Bucket bucket;
  bool oversize = false;
};

// A weight in full [numel], row-major, on the CPU, where this rank owns all of it.
at::Tensor whole(const Source& source) {
  if (source.weight->numel() == 0) return {};
  if (source.own.size() != 1 || source.own[0].count() != source.weight->numel()) {
    throw Bug("stream of weights: this rank does not own '{}' in full", source.weight->name());
  }
  return source.own[0].of(source.own[0].unit->shard()).cpu();
}

void check(const ParamStore& store, const SyncOptions& options) {
  if (options.dtype) to_scalar_type(*options.dtype);
  if (options.bucket_bytes == 0) throw BadConfig("stream of weights: bucket_bytes = 0: allowed: 1 or more");
  if (options.threads < 0 || options.threads > kMostThreads) {
    throw BadConfig("stream of weights: threads = {}: allowed: 0 (as ATen has) to {}", options.threads,
                    kMostThreads);
  }
  if (options.version && *options.version < 0) {
    throw BadConfig("stream of weights: version = {}: allowed: 0 or more", *options.version);
  }
  for (const std::string& name : options.keep_fp32) {
    if (store.table().find(name) == nullptr && !(options.tied_head && name == kHead)) {
      throw BadConfig("stream of weights: keep_fp32 names '{}', which the model does not have", name);
    }
  }
}

// Greedy, in order, of the tensors that `wanted` says.
std::vector<BucketPlan> plan_buckets(const std::vector<TensorSpec>& tensors, uint64_t bucket_bytes,
                                     const std::function<bool(size_t)>& wanted) {
  std::vector<BucketPlan> plans;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (!wanted(i)) continue;
    const uint64_t bytes = tensors[i].nbytes();
    if (plans.empty() || plans.back().oversize || bytes > bucket_bytes ||
        plans.back().bytes + bytes > bucket_bytes) {
      plans.emplace_back().oversize = bytes > bucket_bytes;
    }
    plans.back().tensors.push_back(i);
    plans.back().bytes += bytes;
  }
  for (BucketPlan& plan : plans) {
    plan.offsets.resize(plan.tensors.size());
    uint64_t at = 0;
    for (const int64_t width : {8, 4, 2}) {
      for (size_t i = 0; i < plan.tensors.size(); ++i) {
        const TensorSpec& tensor = tensors[plan.tensors[i]];
        if (size_of(tensor.dtype) != width) continue;
        plan.offsets[i] = at;
        at += tensor.nbytes();
      }
    }
  }
  return plans;
}

// For the agreement of ranks: a line for each option, so that the one that differs is named.
std::string describe(const SyncOptions& options, const std::vector<TensorSpec>& tensors) {
  const std::set<std::string> kept(options.keep_fp32.begin(), options.keep_fp32.end());
  std::string text = fmt::format(
      "dtype = {}\nkeep_fp32 = {}\ntied_head = {}\nbucket_bytes = {}\nversion = {}\nchecksums = {}\n",
      options.dtype ? name(*options.dtype) : "that of the masters", fmt::join(kept, ", "), options.tied_head,
      options.bucket_bytes, options.version ? std::to_string(*options.version) : "the next",
      options.checksums);
  for (const TensorSpec& t : tensors)
    text += fmt::format("{} {} [{}]\n", t.name, name(t.dtype), fmt::join(t.shape, ", "));
  return text;
}

// The ranks of this copy, on a channel that a stream's thread has to itself.
Group group_of(const Mesh& mesh) {
  return mesh.world().group(
      ranks_along(mesh.dims(), mesh.rank(), {.pp = true, .dp_shard = true, .cp = true, .tp = true}), "sync");
}

// The weight as blocks see it, where that is what the stream sends.
at::Tensor view_of(const Weight& weight, Dtype dtype) {
  const at::Tensor flat = weight.unit().current();
  if (!flat.defined() || !flat.is_cpu() || to_dtype(flat.scalar_type()) != dtype) return {};
  return flat.narrow(0, weight.offset(), weight.numel());
}

}  // namespace

struct BucketStream::State {
  State(ParamStore& store, const SyncOptions& options);
  ~State();

  void prepare(const ParamStore& store, const SyncOptions& options);  // what one rank alone may refuse
  void start(const std::function<bool(size_t)>& wanted);              // tensors, in buckets
  void run();
  void give_memory(const BucketPlan& plan, Filled& out);
  void take_back(Filled filled);
  void fill(const BucketPlan& plan, Filled& out, Crew& crew);
  void close();

  Group ranks;                       // of the copy, for the thread
  std::optional<Gatherer> gatherer;  // where they are several
  int rank;                          // of the world

  StreamHeader header;
  std::vector<Source> sources;  // of header.tensors
  std::vector<BucketPlan> plans;
  uint64_t slot_bytes = 0, large_bytes = 0;  // of the fullest bucket, and of the largest oversize tensor
  const BucketPlan *last_slot = nullptr, *last_large = nullptr;  // that need such memory
  uint64_t bucket_bytes;
  bool checksums;
  int threads;
  std::vector<uint64_t> hashes;  // of the tensors that were given out

  std::mutex mutex;  // guards what follows
  std::condition_variable changed;
  std::optional<Filled> ready, held;  // filled and not asked for yet; with the consumer
  const BucketPlan* filling = nullptr;
  std::vector<at::Tensor> spare;  // memory for buckets
  at::Tensor large;               // for an oversize one: never are two alive
  std::exception_ptr error;
  bool stop = false;

  size_t taken = 0;                  // buckets given out
  std::shared_ptr<const void> hold;  // on the store
  std::thread thread;
};

BucketStream::State::State(ParamStore& store, const SyncOptions& options)
    : ranks(group_of(store.mesh())),
      rank(store.mesh().rank()),
      bucket_bytes(options.bucket_bytes),
      checksums(options.checksums),
      threads(options.threads > 0 ? options.threads : at::get_num_threads()) {
  // Of all ranks, those of other copies too: one that refuses would leave them in a stream that it knows
  // nothing of.
  const Group& all = store.mesh().all();
  agree(all, [&] { prepare(store, options); });
  if (all.size() > 1) {
    agree_on(all, "the stream of weights that is asked for", describe(options, header.tensors));
  }
  header.version = store.stream_version(options.version);
  if (ranks.size() > 1) gatherer.emplace(store, ranks, bucket_bytes / 4);
  hold = store.hold(fmt::format("a stream of weights (version {})", header.version));
}

void BucketStream::State::prepare(const ParamStore& store, const SyncOptions& options) {
  check(store, options);
  if (ranks.size() > 1) store.check_free();  // two streams would share the group
  std::map<const Weight*, std::vector<Slice>> slices;
  for (const Slice& slice : store.slices()) slices[slice.weight].push_back(slice);
  const std::set<std::string> kept(options.keep_fp32.begin(), options.keep_fp32.end());
  const auto add = [&](const std::string& name, const Weight& weight) {
    const Dtype dtype =
        kept.count(name) ? Dtype::F32 : options.dtype.value_or(to_dtype(store.dtypes().param));
    header.tensors.push_back({name, dtype, weight.shape()});
    header.bytes += header.tensors.back().nbytes();
    sources.push_back({&weight, slices[&weight], ranks.size() == 1 ? view_of(weight, dtype) : at::Tensor()});
  };
  for (const auto& weight : store.table().weights()) add(weight->name(), *weight);
  if (options.tied_head && store.table().find(kHead) == nullptr) {
    for (const auto& use : store.table().second_uses()) add(kHead, *use.weight);
  }
  header.buckets =
      static_cast<int64_t>(plan_buckets(header.tensors, bucket_bytes, [](size_t) { return true; }).size());
}

void BucketStream::State::start(const std::function<bool(size_t)>& wanted) {
  plans = plan_buckets(header.tensors, bucket_bytes, wanted);
  if (plans.empty()) return;
  for (const BucketPlan& plan : plans) {
    uint64_t& most = plan.oversize ? large_bytes : slot_bytes;
    most = std::max(most, plan.bytes);
    (plan.oversize ? last_large : last_slot) = &plan;
  }
  sigset_t all, before;  // signals are for the training thread
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  thread = std::thread([this] { run(); });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

BucketStream::State::~State() {
  close();
}

void BucketStream::State::close() {
  {
    const std::lock_guard lock(mutex);
    stop = true;
  }
  changed.notify_all();
  if (thread.joinable()) thread.join();
  held.reset();
  ready.reset();
  spare.clear();
  large.reset();
  sources.clear();
  hold.reset();
}

void BucketStream::State::run() {
  try {
    Crew crew(threads - 1);
    for (const BucketPlan& plan : plans) {
      Filled filled;
      filled.oversize = plan.oversize;
      filled.bucket.index = &plan - plans.data();
      {
        std::unique_lock lock(mutex);
        // Never two oversize tensors at once: they would be more than the memory that is promised.
        changed.wait(lock, [&] { return stop || (!ready && !(plan.oversize && held && held->oversize)); });
      }
      // The last word of a rank that will not come to the next gather.
      agree(ranks, [&] { give_memory(plan, filled); });
      fill(plan, filled, crew);
      {
        const std::lock_guard lock(mutex);
        ready = std::move(filled);
      }
      changed.notify_all();
    }
  } catch (...) {
    const std::lock_guard lock(mutex);
    error = std::current_exception();
    changed.notify_all();
  }
}

void BucketStream::State::give_memory(const BucketPlan& plan, Filled& out) {
  {
    const std::lock_guard lock(mutex);
    if (stop) {
      throw BadConfig(
          "stream of weights (version {}): closed on rank {} before its end, after {} of {} buckets",
          header.version, rank, taken, plans.size());
    }
    filling = &plan;
    if (last_slot < filling) spare.clear();
    if (plan.oversize) {
      out.buffer = std::move(large);
    } else if (!spare.empty()) {
      out.buffer = std::move(spare.back());
      spare.pop_back();
    }
  }
  if (!out.buffer.defined())
    out.buffer = zero_pages(static_cast<int64_t>(plan.oversize ? large_bytes : slot_bytes), at::kByte);
}

// Memory that no later bucket needs is given back to the system.
void BucketStream::State::take_back(Filled filled) {
  if (filled.oversize && filling < last_large) large = std::move(filled.buffer);
  if (!filled.oversize && filling < last_slot) spare.push_back(std::move(filled.buffer));
}

void BucketStream::State::fill(const BucketPlan& plan, Filled& out, Crew& crew) {
  struct Piece {
    const std::byte* from;  // null where the bytes are in place
    Dtype master;
    std::byte* to;
    Dtype dtype;
    uint64_t bytes;    // of the output
    uint64_t* leaves;  // null without checksums
  };
  auto* memory = static_cast<std::byte*>(out.buffer.data_ptr());
  std::vector<at::Tensor> full;  // keeps what `from` points to
  std::vector<Gatherer::Target> targets;
  std::vector<std::vector<uint64_t>> leaves(plan.tensors.size());
  std::vector<Piece> pieces;
  for (size_t i = 0; i < plan.tensors.size(); ++i) {
    const TensorSpec& spec = header.tensors[plan.tensors[i]];
    const Source& source = sources[plan.tensors[i]];
    const uint64_t offset = plan.offsets[i], bytes = spec.nbytes();
    out.bucket.tensors.push_back({spec, offset, 0});
    if (checksums) leaves[i].resize((bytes + kHashLeaf - 1) / kHashLeaf);
    const std::byte* from = nullptr;
    Dtype master = spec.dtype;
    if (gatherer) {
      targets.push_back({source.weight, spec.dtype, memory + offset});
    } else if (bytes > 0) {
      full.push_back(source.ready.defined() ? source.ready : whole(source));
      from = static_cast<const std::byte*>(full.back().const_data_ptr());
      master = to_dtype(full.back().scalar_type());
    }
    for (uint64_t at = 0; at < bytes; at += kPiece) {
      pieces.push_back({from ? from + at / size_of(spec.dtype) * size_of(master) : nullptr, master,
                        memory + offset + at, spec.dtype, std::min(kPiece, bytes - at),
                        checksums ? leaves[i].data() + at / kHashLeaf : nullptr});
    }
  }
  if (gatherer) gatherer->run(targets, crew);
  crew.run(static_cast<int64_t>(pieces.size()), [&](int64_t i) {
    const Piece& p = pieces[i];
    // Leaf by leaf, so that the hash reads what is in the core's cache.
    for (uint64_t at = 0; at < p.bytes; at += kHashLeaf) {
      const uint64_t bytes = std::min<uint64_t>(kHashLeaf, p.bytes - at);
      const auto count = static_cast<int64_t>(bytes) / size_of(p.dtype);
      if (p.from != nullptr)
        convert(p.from + at / size_of(p.dtype) * size_of(p.master), p.master, p.to + at, p.dtype, count);
      if (p.leaves != nullptr) p.leaves[at / kHashLeaf] = Hash64::of({p.to + at, bytes});
    }
  });
  for (size_t i = 0; checksums && i < leaves.size(); ++i)
    out.bucket.tensors[i].checksum = Hash64::of(std::as_bytes(std::span(leaves[i])));
  out.bucket.bytes = {memory, plan.bytes};
}

BucketStream::BucketStream(ParamStore& store, const SyncOptions& options)
    : BucketStream(std::make_unique<State>(store, options)) {
  state_->start([](size_t) { return true; });
}
BucketStream::BucketStream(std::unique_ptr<State> state) : state_(std::move(state)) {}
BucketStream::BucketStream(BucketStream&&) noexcept = default;
BucketStream& BucketStream::operator=(BucketStream&&) noexcept = default;
BucketStream::~BucketStream() = default;

const StreamHeader& BucketStream::header() const {
  return state_->header;
}

std::optional<Bucket> BucketStream::next() {
  State& s = *state_;
  std::unique_lock lock(s.mutex);
  if (s.held) {
    s.take_back(std::move(*s.held));
    s.held.reset();
    s.changed.notify_all();
  }
  if (s.taken == s.plans.size()) {
    lock.unlock();
    s.close();
    return std::nullopt;
  }
  s.changed.wait(lock, [&] { return s.ready || s.error; });
  if (s.error) std::rethrow_exception(s.error);
  s.held = std::move(s.ready);
  s.ready.reset();
  s.changed.notify_all();
  ++s.taken;
  for (const BucketTensor& tensor : s.held->bucket.tensors) s.hashes.push_back(tensor.checksum);
  return s.held->bucket;
}

uint64_t BucketStream::checksum() const {
  if (state_->taken != state_->plans.size())
    throw Bug("the checksum of a stream of weights is known at its end");
  if (!state_->checksums) return 0;
  return total_checksum(state_->header.tensors, state_->hashes);
}

TensorStream::TensorStream(ParamStore& store, const SyncOptions& options)
    : buckets_(std::make_unique<BucketStream::State>(store, options)) {}

std::optional<NamedTensor> TensorStream::next() {
  BucketStream::State& state = *buckets_.state_;
  if (!started_) {
    state.start([&](size_t i) { return !state.sources[i].ready.defined(); });
    started_ = true;
  }
  if (position_ == state.header.tensors.size()) {
    bucket_.reset();
    buckets_.next();  // its end
    return std::nullopt;
  }
  const size_t i = position_++;
  if (const at::Tensor& ready = state.sources[i].ready; ready.defined()) {
    return NamedTensor{state.header.tensors[i].name, ready.view(state.header.tensors[i].shape)};
  }
  if (!bucket_ || at_ == bucket_->tensors.size()) {
    at_ = 0;
    bucket_ = buckets_.next();
    if (!bucket_) throw Bug("a stream of weights ended before its last tensor");
  }
  const BucketTensor& tensor = bucket_->tensors[at_++];
  auto* data = const_cast<std::byte*>(bucket_->bytes.data() + tensor.offset);
  return NamedTensor{tensor.spec.name,
                     at::from_blob(data, tensor.spec.shape, to_scalar_type(tensor.spec.dtype))};
}

BucketStream TensorStream::into_buckets() && {
  if (started_) throw Bug("a stream of weights that gave tensors is asked for its buckets");
  buckets_.state_->start([](size_t) { return true; });
  return std::move(buckets_);
}

TensorStream get_per_tensor_param(ParamStore& store, const SyncOptions& options) {
  return TensorStream(store, options);
}

}  // namespace titanium

#include "titanium/weights/receive.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <cstring>
#include <map>
#include <set>

#include "titanium/base/error.h"
#include "titanium/weights/hash.h"
#include "titanium/weights/receive_target.h"
#include "titanium/weights/scalar_type.h"
#include "titanium/weights/sync_wire.h"

namespace titanium {
namespace {

class TensorTarget final : public ReceiveTarget {
 public:
  TensorTarget(std::map<std::string, at::Tensor> tensors, bool convert)
      : tensors_(std::move(tensors)), convert_(convert) {
    for (const auto& [name, tensor] : tensors_)
      specs_[name] = {name, to_dtype(tensor.scalar_type()), tensor.sizes().vec()};
  }

  std::string what() const override { return "the tensors"; }
  std::vector<std::string> names() const override {
    std::vector<std::string> names;
    for (const auto& [name, tensor] : tensors_) names.push_back(name);
    return names;
  }
  const TensorSpec* find(const std::string& name) const override {
    const auto found = specs_.find(name);
    return found == specs_.end() ? nullptr : &found->second;
  }
  bool converts() const override { return convert_; }
  std::optional<int64_t> version() const override { return version_; }

  void look() override {}
  void begin(const std::vector<std::string>&, int64_t) override {}
  void apply(const TensorView& view) override {
    const at::NoGradGuard no_grad;
    at::Tensor& target = tensors_.at(view.name);
    const at::ScalarType dtype = to_scalar_type(view.dtype);
    if (target.is_cpu() && target.is_contiguous() && target.scalar_type() == dtype) {
      if (view.nbytes > 0) std::memcpy(target.data_ptr(), view.data, view.nbytes);
      return;
    }
    at::Tensor values = at::empty(view.shape, at::TensorOptions().dtype(dtype));  // views may be unaligned
    if (view.nbytes > 0) std::memcpy(values.data_ptr(), view.data, view.nbytes);
    target.copy_(values);
  }
  void commit(int64_t version) override { version_ = version; }
  void drop() noexcept override {}

 private:
  std::map<std::string, at::Tensor> tensors_;
  std::map<std::string, TensorSpec> specs_;
  bool convert_;
  std::optional<int64_t> version_;
};

std::string text_of(const TensorSpec& spec) {
  return fmt::format("{} [{}]", torch_name(spec.dtype), fmt::join(spec.shape, ", "));
}

}  // namespace

struct WeightReceiver::State {
  struct Announced {
    TensorSpec spec;
    bool known = false;                // to the target
    std::optional<uint64_t> checksum;  // once it came
  };
  struct Open {
    int64_t version = 0, buckets = 0;
    int64_t next = 1;  // index of the message that comes now
    std::vector<Announced> tensors;
    std::map<std::string, size_t> index;
    ReceiveReport report;
  };

  std::unique_ptr<ReceiveTarget> target;
  std::optional<Open> open;

  std::optional<ReceiveReport> take(const StreamMessage& message);
  void begin(const StreamMessage& message);
  void bucket(const StreamMessage& message);
  ReceiveReport end(const StreamMessage& message);
  void drop() {
    open.reset();
    target->drop();
  }
};

void WeightReceiver::State::begin(const StreamMessage& message) {
  if (open) {
    throw BadData("a stream of weights (version {}) begins before the one of version {} has ended",
                  message.version, open->version);
  }
  if (message.index != 0) throw BadData("a stream of weights begins with message {}, not 0", message.index);
  target->look();
  const auto have = target->version();
  if (have && message.version <= *have) {
    throw BadData("{}: weights of version {} came, but those here are of version {} already", target->what(),
                  message.version, *have);
  }
  Open fresh;
  fresh.version = fresh.report.version = message.version;
  fresh.buckets = message.header.buckets;
  std::vector<std::string> updated;
  for (const TensorSpec& spec : message.header.tensors) {
    fresh.index[spec.name] = fresh.tensors.size();
    const TensorSpec* own = target->find(spec.name);
    fresh.tensors.push_back({spec, own != nullptr, {}});
    if (own == nullptr) {
      fresh.report.unknown.push_back(spec.name);
      continue;
    }
    if (own->shape != spec.shape || (own->dtype != spec.dtype && !target->converts())) {
      throw BadData("{}: tensor '{}' comes as {}, but is {} here", target->what(), spec.name, text_of(spec),
                    text_of(*own));
    }
    updated.push_back(spec.name);
  }
  for (const std::string& name : target->names()) {
    if (!fresh.index.count(name)) fresh.report.not_updated.push_back(name);
  }
  target->begin(updated, message.version);
  open = std::move(fresh);
}

void WeightReceiver::State::bucket(const StreamMessage& message) {
  if (open->next > open->buckets)
    throw BadData("a stream of weights has more than its {} buckets", open->buckets);
  // The whole bucket is checked before any of it is applied.
  std::set<const Announced*> fresh;
  for (const TensorView& view : message.tensors) {
    const auto found = open->index.find(view.name);
    if (found == open->index.end()) throw BadData("tensor '{}' comes unannounced", view.name);
    Announced& tensor = open->tensors[found->second];
    if (tensor.checksum || !fresh.insert(&tensor).second) throw BadData("tensor '{}' comes twice", view.name);
    const TensorSpec came{view.name, view.dtype, view.shape};
    if (came.dtype != tensor.spec.dtype || came.shape != tensor.spec.shape) {
      throw BadData("tensor '{}' comes as {}, but was announced as {}", view.name, text_of(came),
                    text_of(tensor.spec));
    }
    const uint64_t want = message.checksums.at(view.name), have = tree_hash({view.data, view.nbytes});
    if (have != want) {
      throw BadData("tensor '{}' is damaged: its checksum is {}, the sender's {}", view.name, to_hex(have),
                    to_hex(want));
    }
  }
  for (const TensorView& view : message.tensors) {
    Announced& tensor = open->tensors[open->index.at(view.name)];
    tensor.checksum = message.checksums.at(view.name);
    if (!tensor.known) continue;
    target->apply(view);
    ++open->report.updated;
    open->report.bytes += view.nbytes;
  }
}

ReceiveReport WeightReceiver::State::end(const StreamMessage& message) {
  std::vector<TensorSpec> specs;
  std::vector<uint64_t> checksums;
  for (const Announced& tensor : open->tensors) {
    if (!tensor.checksum) {
      throw BadData("the stream of weights (version {}) ended without tensor '{}', which it announced",
                    open->version, tensor.spec.name);
    }
    specs.push_back(tensor.spec);
    checksums.push_back(*tensor.checksum);
  }
  if (open->next != open->buckets + 1) {
    throw BadData("the stream of weights (version {}) ended after {} of {} buckets", open->version,
                  open->next - 1, open->buckets);
  }
  const uint64_t have = total_checksum(specs, checksums);
  if (have != message.checksum) {
    throw BadData("the stream of weights (version {}) is damaged: its checksum is {}, the sender's {}",
                  open->version, to_hex(have), to_hex(message.checksum));
  }
  target->commit(open->version);
  ReceiveReport report = std::move(open->report);
  drop();
  return report;
}

WeightReceiver::WeightReceiver(const std::filesystem::path& folder, const ReceiveOptions& options)
    : state_(std::make_unique<State>()) {
  if (options.convert) throw BadConfig("{}: the tensors of a folder are not converted", folder.string());
  state_->target = folder_target(folder, options.fsync);
}

WeightReceiver::WeightReceiver(std::map<std::string, at::Tensor> tensors, const ReceiveOptions& options)
    : state_(std::make_unique<State>()) {
  state_->target = std::make_unique<TensorTarget>(std::move(tensors), options.convert);
}

WeightReceiver::WeightReceiver(WeightReceiver&&) noexcept = default;
WeightReceiver& WeightReceiver::operator=(WeightReceiver&&) noexcept = default;
WeightReceiver::~WeightReceiver() = default;

std::optional<ReceiveReport> WeightReceiver::State::take(const StreamMessage& message) {
  if (message.kind == StreamMessage::Kind::kBegin) {
    begin(message);
    return std::nullopt;
  }
  if (!open)
    throw BadData("message {} of a stream of weights (version {}) comes before its begin", message.index,
                  message.version);
  if (message.version != open->version || message.index != open->next) {
    throw BadData(
        "message {} of version {} of a stream of weights comes where message {} of version {} should",
        message.index, message.version, open->next, open->version);
  }
  if (message.kind == StreamMessage::Kind::kEnd) return end(message);
  bucket(message);
  ++open->next;
  return std::nullopt;
}

std::optional<ReceiveReport> WeightReceiver::take(std::span<const std::byte> bytes) {
  try {
    return state_->take(decode_stream_message(bytes));
  } catch (...) {
    state_->drop();
    throw;
  }
}

ReceiveReport WeightReceiver::take_all(BucketStream stream) {
  try {
    state_->take(begin_of(stream.header()));
    while (const auto bucket = stream.next()) state_->take(bucket_of(stream.header(), *bucket));
    return *state_->take(end_of(stream.header(), stream.checksum()));
  } catch (...) {  // an error of the sender too
    state_->drop();
    throw;
  }
}

std::optional<int64_t> WeightReceiver::version() const {
  return state_->target->version();
}

bool WeightReceiver::open() const {
  return state_->open.has_value();
}

void WeightReceiver::drop() {
  state_->drop();
}

}  // namespace titanium

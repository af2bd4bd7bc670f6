#include "titanium/serve/arguments.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstring>
#include <limits>

namespace titanium {
namespace {

std::string dumped(const Json& json) {
  std::string text = json.dump(-1, ' ', false, Json::error_handler_t::replace);
  if (text.size() > 100) text = text.substr(0, 100) + " ...";
  return text;
}

template <typename T, typename Out>
std::vector<Out> widened(const TensorView& view) {
  std::vector<Out> out(static_cast<size_t>(view.count()));
  for (size_t i = 0; i < out.size(); ++i) {
    T value;
    std::memcpy(&value, view.data + i * sizeof(T), sizeof(T));  // it may lie anywhere
    out[i] = static_cast<Out>(value);
  }
  return out;
}

void require_flat(const TensorView& view) {
  if (view.shape.size() != 1) {
    throw BadData("batch: {} has {} dimensions, expected 1: rows lie end to end", view.name,
                  view.shape.size());
  }
}

std::vector<int64_t> integers(const TensorView& view) {
  require_flat(view);
  switch (view.dtype) {
    case Dtype::I64:
      return widened<int64_t, int64_t>(view);
    case Dtype::I32:
      return widened<int32_t, int64_t>(view);
    case Dtype::I16:
      return widened<int16_t, int64_t>(view);
    case Dtype::I8:
      return widened<int8_t, int64_t>(view);
    case Dtype::U8:
    case Dtype::BOOL:
      return widened<uint8_t, int64_t>(view);
    case Dtype::U16:
      return widened<uint16_t, int64_t>(view);
    case Dtype::U32:
      return widened<uint32_t, int64_t>(view);
    default:
      throw BadData("batch: {} is of dtype {}, expected integers", view.name, name(view.dtype));
  }
}

void require_length(const TensorView& view, size_t expected, const char* of) {
  if (static_cast<size_t>(view.count()) != expected) {
    throw BadData("batch: {} has {} entries, expected {}: one {}", view.name, view.count(), expected, of);
  }
}

MicroBatching read_micro(const Json& json) {
  const auto bad = [&](const char* why) { return BadData("batch: micro is {}: {}", dumped(json), why); };
  if (!json.is_object()) throw bad("expected an object");
  MicroBatching micro;
  for (const auto& [key, value] : json.items()) {
    if (key == "given") {
      if (!value.is_array()) throw bad("given is a list of lists of rows");
      for (const Json& group : value) {
        if (!group.is_array()) throw bad("given is a list of lists of rows");
        for (const Json& row : group) {
          if (!row.is_number_integer()) throw bad("a row is an integer");
        }
        micro.given.push_back(group.get<std::vector<int64_t>>());
      }
    } else if (key == "sequences" || key == "max_tokens" || key == "count_divisor") {
      if (!value.is_number_integer() || value.get<int64_t>() <= 0) throw bad("numbers are integers above 0");
      (key == "sequences"    ? micro.sequences
       : key == "max_tokens" ? micro.max_tokens
                             : micro.count_divisor) = value.get<int64_t>();
    } else {
      throw bad("allowed keys: given, sequences, max_tokens, count_divisor");
    }
  }
  return micro;
}

Counts read_counts(const Json& json) {
  Counts counts;
  for (const auto& [key, field] :
       {std::pair{"tokens", &counts.tokens}, std::pair{"sequences", &counts.sequences},
        std::pair{"untrained", &counts.untrained}}) {
    if (!json.is_object() || !json.contains(key)) continue;
    if (!json[key].is_number_integer() || json[key].get<int64_t>() < 0) {
      throw BadData("batch: counts.{} is {}, expected an integer of at least 0", key, dumped(json[key]));
    }
    *field = json[key].get<int64_t>();
  }
  if (!json.is_object() || !json.contains("tokens") || !json.contains("sequences") || json.size() > 3 ||
      (json.size() == 3 && !json.contains("untrained"))) {
    throw BadData("batch: counts is {}, expected tokens, sequences and perhaps untrained", dumped(json));
  }
  return counts;
}

constexpr std::pair<Report::Op, const char*> kOps[] = {{Report::kMean, "mean"},
                                                       {Report::kSum, "sum"},
                                                       {Report::kMax, "max"},
                                                       {Report::kMin, "min"},
                                                       {Report::kStd, "std"},
                                                       {Report::kSampleStd, "sample_std"},
                                                       {Report::kSampleSize, "sample_size"}};

}  // namespace

Arguments::Arguments(const Message& call, std::initializer_list<const char*> allowed)
    : method_(call.name), json_(call.body) {
  for (const auto& item : json_.items()) {
    if (std::none_of(allowed.begin(), allowed.end(), [&](const char* key) { return item.key() == key; })) {
      std::string keys;
      for (const char* key : allowed) keys += (keys.empty() ? "" : ", ") + std::string(key);
      throw BadConfig("{}: unknown argument '{}'; allowed: {}", method_, item.key(),
                      keys.empty() ? "none" : keys);
    }
  }
}

bool Arguments::has(const char* key) const {
  return json_.contains(key) && !json_.at(key).is_null();
}

const Json& Arguments::at(const char* key) const {
  if (!has(key)) throw BadConfig("{}: argument '{}' is missing", method_, key);
  return json_.at(key);
}

void Arguments::wrong(const char* key, const char* expected) const {
  throw BadConfig("{}: argument '{}' is {}, expected {}", method_, key, dumped(at(key)), expected);
}

std::string Arguments::text(const char* key) const {
  if (!at(key).is_string()) wrong(key, "a string");
  return at(key).get<std::string>();
}

std::string Arguments::path(const char* key) const {
  std::string text = this->text(key);
  if (text.find('\0') != text.npos) wrong(key, "a path: no NUL");  // the system would see the part before it
  return text;
}

bool Arguments::flag(const char* key, bool absent) const {
  if (!has(key)) return absent;
  if (!at(key).is_boolean()) wrong(key, "true or false");
  return at(key).get<bool>();
}

int64_t Arguments::integer(const char* key) const {
  const Json& value = at(key);
  if (!value.is_number_integer() ||
      (value.is_number_unsigned() && value.get<uint64_t>() > uint64_t{1} << 62)) {
    wrong(key, "an integer");
  }
  return value.get<int64_t>();
}

int64_t Arguments::integer(const char* key, int64_t absent) const {
  return has(key) ? integer(key) : absent;
}

double Arguments::number(const char* key) const {
  if (!at(key).is_number()) wrong(key, "a number");
  return at(key).get<double>();
}

std::vector<int64_t> read_integers(const Message& message, std::string_view tensor) {
  return integers(message.at(tensor));
}

std::vector<double> read_numbers(const TensorView& view) {
  require_flat(view);
  if (!is_floating(view.dtype)) {
    const std::vector<int64_t> values = integers(view);
    return {values.begin(), values.end()};
  }
  std::vector<double> out(static_cast<size_t>(view.count()));
  convert(view.data, view.dtype, reinterpret_cast<std::byte*>(out.data()), Dtype::F64, view.count());
  return out;
}

at::Tensor read_tensor(const TensorView& view) {
  if (!is_floating(view.dtype)) {
    throw BadData("{} is of dtype {}, expected a floating one", view.name, name(view.dtype));
  }
  const bool wide = view.dtype == Dtype::F64;
  const at::Tensor out = at::empty(view.shape, wide ? at::kDouble : at::kFloat);
  convert(view.data, view.dtype, static_cast<std::byte*>(out.data_ptr()), wide ? Dtype::F64 : Dtype::F32,
          view.count());
  return out;
}

EngineBatch read_batch(const Message& call, const Arguments& args) {
  const std::vector<int64_t> ids = integers(call.at("input_ids"));
  const std::vector<int64_t> offsets = integers(call.at("offsets"));
  if (offsets.empty() || offsets.front() != 0 || offsets.back() != static_cast<int64_t>(ids.size()) ||
      !std::is_sorted(offsets.begin(), offsets.end())) {
    throw BadData("batch: offsets must rise from 0 to {}, the number of input_ids", ids.size());
  }
  const size_t rows = offsets.size() - 1;
  EngineBatch batch;
  batch.samples.resize(rows);

  std::vector<int64_t> mask(ids.size(), 1);
  if (const TensorView* view = call.find("loss_mask")) {
    require_length(*view, ids.size(), "for each token of input_ids");
    mask.clear();
    for (const double value : read_numbers(*view)) {
      if (value != 0 && value != 1) throw BadData("batch: loss_mask holds {}, allowed are 0 and 1", value);
      mask.push_back(value != 0);
    }
  }
  for (size_t row = 0; row < rows; ++row) {
    Sample& sample = batch.samples[row];
    for (int64_t i = offsets[row]; i < offsets[row + 1]; ++i) {
      const int64_t id = ids[static_cast<size_t>(i)];
      if (id < 0 || id > std::numeric_limits<int32_t>::max()) {
        throw BadData("batch: row {}, token {}: the id {} is no token id", row, i - offsets[row], id);
      }
      sample.ids.push_back(static_cast<int32_t>(id));
      sample.loss_mask.push_back(static_cast<uint8_t>(mask[static_cast<size_t>(i)]));
    }
  }

  const auto of_row = [&](const TensorView& view) {
    require_length(view, rows, "for each row");
    return read_numbers(view);
  };
  if (args.has("temperature")) batch.temperature = args.number("temperature");
  if (const TensorView* view = call.find("temperature")) {
    const std::vector<double> values = of_row(*view);
    for (size_t row = 0; row < rows; ++row) batch.samples[row].temperature = values[row];
  }
  if (const TensorView* view = call.find("group")) {
    require_length(*view, rows, "for each row");
    const std::vector<int64_t> values = integers(*view);
    for (size_t row = 0; row < rows; ++row) batch.samples[row].group = values[row];
  }
  constexpr std::string_view kColumn = "columns.", kSeqColumn = "seq_columns.";
  for (const TensorView& view : call.tensors) {
    if (view.name.starts_with(kColumn)) {
      require_length(view, ids.size(), "for each token of input_ids");
      const std::vector<double> values = read_numbers(view);
      const std::string column = view.name.substr(kColumn.size());
      for (size_t row = 0; row < rows; ++row) {
        batch.samples[row].columns[column].assign(values.begin() + offsets[row],
                                                  values.begin() + offsets[row + 1]);
      }
    } else if (view.name.starts_with(kSeqColumn)) {
      const std::vector<double> values = of_row(view);
      const std::string column = view.name.substr(kSeqColumn.size());
      for (size_t row = 0; row < rows; ++row) batch.samples[row].seq_columns[column] = values[row];
    } else if (view.name != "input_ids" && view.name != "offsets" && view.name != "loss_mask" &&
               view.name != "temperature" && view.name != "group") {
      throw BadData("batch: unknown tensor '{}'", view.name);
    }
  }

  if (args.has("micro")) {
    batch.micro = read_micro(args.at("micro"));
    if (args.at("micro").contains("given") && batch.micro.given.empty() && rows > 0)
      throw BadData("batch: micro is {}: the {} rows are given to no micro-batch", dumped(args.at("micro")),
                    rows);
  }
  if (args.has("counts")) batch.counts = read_counts(args.at("counts"));
  batch.calculate_entropy = args.flag("calculate_entropy", false);
  batch.calculate_sum_pi_squared = args.flag("calculate_sum_pi_squared", false);
  batch.return_model_output = args.flag("return_model_output", false);
  return batch;
}

void add_tensor(Message& message, std::string name, const at::Tensor& tensor) {
  const auto kept = std::make_shared<at::Tensor>(tensor.detach().to(at::kCPU).contiguous());
  Dtype dtype = Dtype::F32;
  switch (kept->scalar_type()) {
    case at::kFloat:
      break;
    case at::kDouble:
      dtype = Dtype::F64;
      break;
    case at::kBFloat16:
      dtype = Dtype::BF16;
      break;
    case at::kHalf:
      dtype = Dtype::F16;
      break;
    case at::kLong:
      dtype = Dtype::I64;
      break;
    default:
      throw Bug("message: tensor '{}' is of dtype {}", name, c10::toString(kept->scalar_type()));
  }
  message.tensors.push_back({std::move(name), dtype, kept->sizes().vec(),
                             static_cast<const std::byte*>(kept->data_ptr()), kept->nbytes()});
  message.owners.push_back(kept);
}

void add_output(Message& reply, const EngineOutput& output) {
  const std::vector<int64_t>* offsets = nullptr;
  for (const auto& [name, rows] : output.model_output) {
    if (offsets == nullptr)
      reply.add("offsets", rows.offsets);
    else if (*offsets != rows.offsets)
      throw Bug("model_output '{}' has rows of other lengths", name);
    offsets = &rows.offsets;
    add_tensor(reply, "model_output." + name, rows.values.defined() ? rows.values : at::empty({0}));
  }
  reply.add("loss", output.loss);
  reply.body["metrics"] = reports_json(output.metrics);
}

Json reports_json(const Reports& reports) {
  Json json = Json::object();
  for (const auto& [name, report] : reports) {
    const auto* op =
        std::find_if(std::begin(kOps), std::end(kOps), [&](const auto& o) { return o.first == report.op; });
    json[name] = {{"value", json_number(report.value())},
                  {"sum", json_number(report.sum)},
                  {"count", json_number(report.count)},
                  {"op", op->second}};
    if (report.spread != 0) json[name]["spread"] = json_number(report.spread);
  }
  return json;
}

Reports read_reports(const Json& json) {
  if (!json.is_object()) throw BadData("metrics: expected an object, not {}", dumped(json));
  Reports reports;
  for (const auto& [name, value] : json.items()) {
    if (!value.is_object() || !value.contains("sum")) {
      throw BadData("metric '{}' is {}, expected sum, count and op", name, dumped(value));
    }
    Report report;
    for (const auto& [key, part] : value.items()) {
      if (key == "sum") {
        report.sum = as_number(part, "metric '" + name + "'");
      } else if (key == "count") {
        report.count = as_number(part, "metric '" + name + "'");
      } else if (key == "spread") {
        report.spread = as_number(part, "metric '" + name + "'");
      } else if (key == "op") {
        const auto* op =
            std::find_if(std::begin(kOps), std::end(kOps), [&](const auto& o) { return part == o.second; });
        if (op == std::end(kOps)) {
          throw BadData("metric '{}': op {}; allowed: mean, sum, max, min, std, sample_std, sample_size",
                        name, dumped(part));
        }
        report.op = op->first;
      } else {
        throw BadData("metric '{}': unknown key '{}'; allowed: sum, count, spread, op", name, key);
      }
    }
    if (!value.contains("count")) report.count = 1;
    reports[name] = report;
  }
  return reports;
}

Json param_groups_json(const std::vector<ParamGroup>& groups) {
  Json json = Json::array();
  for (const ParamGroup& g : groups) {
    json.push_back({{"lr", json_number(g.lr)},
                    {"betas", {json_number(g.beta1), json_number(g.beta2)}},
                    {"eps", json_number(g.eps)},
                    {"weight_decay", json_number(g.weight_decay)}});
  }
  return json;
}

std::vector<ParamGroup> read_param_groups(const Json& json) {
  if (!json.is_array()) throw BadConfig("param_groups: expected a list");
  std::vector<ParamGroup> groups;
  for (const Json& g : json) {
    const auto number = [&](const Json& from, const char* key) {
      if (!from.is_number())
        throw BadConfig("param_groups: {} is {}, expected a finite number", key, dumped(from));
      return from.get<double>();
    };
    if (!g.is_object() || g.size() != 4 || !g.contains("lr") || !g.contains("betas") || !g.contains("eps") ||
        !g.contains("weight_decay") || !g["betas"].is_array() || g["betas"].size() != 2) {
      throw BadConfig("param_groups: {}, expected lr, betas (two), eps, weight_decay", dumped(g));
    }
    ParamGroup group;
    group.lr = number(g["lr"], "lr");
    group.beta1 = number(g["betas"][0], "betas");
    group.beta2 = number(g["betas"][1], "betas");
    group.eps = number(g["eps"], "eps");
    group.weight_decay = number(g["weight_decay"], "weight_decay");
    if (group.lr < 0 || group.eps < 0 || group.weight_decay < 0 || group.beta1 < 0 || group.beta1 >= 1 ||
        group.beta2 < 0 || group.beta2 >= 1) {
      throw BadConfig("param_groups: {}: lr, eps and weight_decay must be at least 0, betas in [0, 1)",
                      dumped(g));
    }
    groups.push_back(group);
  }
  return groups;
}

SyncOptions read_sync_options(const Arguments& args) {
  SyncOptions options;
  if (args.has("dtype")) {
    const std::string text = args.text("dtype");
    if (text == "master") {
      options.dtype.reset();
    } else {
      options.dtype = parse_dtype(text);
      if (!options.dtype) {
        throw BadConfig(
            "get_per_tensor_param: dtype '{}'; allowed: bfloat16, float32, float64, float16, and master "
            "for that of the masters",
            text);
      }
    }
  }
  if (args.has("keep_fp32")) {
    const Json& names = args.at("keep_fp32");
    if (!names.is_array() ||
        !std::all_of(names.begin(), names.end(), [](const Json& n) { return n.is_string(); })) {
      throw BadConfig("get_per_tensor_param: keep_fp32 is {}, expected a list of names", dumped(names));
    }
    options.keep_fp32 = names.get<std::vector<std::string>>();
  }
  options.tied_head = args.flag("tied_head", options.tied_head);
  const int64_t bytes = args.integer("bucket_bytes", static_cast<int64_t>(options.bucket_bytes));
  if (bytes <= 0) throw BadConfig("get_per_tensor_param: bucket_bytes is {}, expected more than 0", bytes);
  options.bucket_bytes = static_cast<uint64_t>(bytes);
  if (args.has("version")) options.version = args.integer("version");
  options.checksums = args.flag("checksums", options.checksums);
  const int64_t threads = args.integer("threads", options.threads);
  if (threads < 0 || threads > INT_MAX)
    throw BadConfig("get_per_tensor_param: threads is {}, expected 0 or more", threads);
  options.threads = static_cast<int>(threads);
  return options;
}

}  // namespace titanium

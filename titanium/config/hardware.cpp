#include "titanium/config/hardware.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <toml++/toml.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <sstream>
#include <vector>

#include "titanium/base/error.h"
#include "titanium/config/nearest.h"
#include "titanium/config/toml_guard.h"

namespace titanium {
namespace {

constexpr uintmax_t kMostBytes = 1 << 20;

// What a number may be.  Beyond these a step would take no time, or for ever.
struct Range {
  double from, to;
  bool needed;
};
constexpr Range kRate{1, 1e30, true}, kSeconds{0, 1e6, false}, kBytes{0, 1e30, false};

struct Number {
  const char* section;
  const char* key;
  double* target;
  Range range;
  const char* doc;
};

std::vector<Number> numbers(Hardware& h) {
  return {
      {"compute", "matmul", &h.matmul, kRate, "FLOP/s of a layer's matrix products, forward"},
      {"compute", "matmul_backward", &h.matmul_backward, kRate, "FLOP/s of their gradients"},
      {"compute", "attention", &h.attention, kRate, "FLOP/s of causal attention, forward"},
      {"compute", "attention_backward", &h.attention_backward, kRate, "FLOP/s of its gradients"},
      {"compute", "head", &h.head, kRate, "FLOP/s of the head"},
      {"compute", "action", &h.action, kSeconds, "seconds that every action costs besides"},
      {"memory", "update", &h.update, kRate, "bytes/s of norm, clip and optimizer"},
      {"memory", "copy", &h.copy, kRate, "bytes/s of casts"},
      {"memory", "capacity", &h.capacity, kBytes, "bytes that a rank may hold; 0: not known"},
  };
}

struct Axis {
  const char* name;
  Hardware::Link* link;
};
std::vector<Axis> axes(Hardware& h) {
  return {{"dp_shard", &h.dp_shard}, {"dp_replicate", &h.dp_replicate}, {"tp", &h.tp}, {"pp", &h.pp}};
}

std::string given(const toml::node& node) {
  if (const auto number = node.value<double>(); number && node.is_number())
    return fmt::format("{:g}", *number);
  if (const toml::value<std::string>* text = node.as_string()) return fmt::format("'{:.40}'", text->get());
  if (node.is_boolean()) return *node.value<bool>() ? "true" : "false";
  return node.is_table() ? "a section" : node.is_array() ? "a list" : "a date or time";
}

class Reader {
 public:
  explicit Reader(std::string source) : source_(std::move(source)) {}

  [[noreturn]] void fail(const toml::node* node, const std::string& key, const std::string& why) const {
    const std::string line =
        node != nullptr && node->source().begin.line > 0 ? fmt::format(":{}", node->source().begin.line) : "";
    throw BadConfig("{}{}: {}: {}", source_, line, key, why);
  }

  const toml::table* table(const toml::table& in, const std::string& name, const std::string& shown) const {
    const toml::node* node = in.get(name);
    if (node == nullptr) return nullptr;
    if (!node->is_table()) fail(node, shown, "must be a section");
    return node->as_table();
  }

  bool number(const toml::table* in, const std::string& key, const std::string& shown, const Range& range,
              double* to) const {
    const toml::node* node = in == nullptr ? nullptr : in->get(key);
    if (node == nullptr) return false;
    const auto value = node->value<double>();
    const bool fits = node->is_number() && value && *value >= range.from && *value <= range.to;  // not NaN
    if (!fits)
      fail(node, fmt::format("{} = {}", shown, given(*node)),
           fmt::format("allowed: a number from {:g} to {:g}", range.from, range.to));
    *to = *value;
    return true;
  }

  void only(const toml::table& in, const std::string& section, const std::vector<std::string>& known) const {
    for (const auto& [key, node] : in) {
      const std::string name(key.str());
      if (std::find(known.begin(), known.end(), name) != known.end()) continue;
      fail(&node, section.empty() ? name : section + "." + name,
           nearest(name, known).empty()
               ? fmt::format("unknown key; there are: {}", fmt::join(known, ", "))
               : fmt::format("unknown key; did you mean '{}'?", nearest(name, known)));
    }
  }

 private:
  std::string source_;
};

}  // namespace

Hardware Hardware::parse(std::string_view text, const std::string& source) {
  const GuardedToml guarded(text, source);
  toml::table root;
  try {
    root = toml::parse(guarded.text());
  } catch (const toml::parse_error& e) {
    throw BadConfig("{}:{}: {}", source, e.source().begin.line, guarded.restore(e.description()));
  }
  Hardware h;
  const Reader read(source);
  read.only(root, "", {"compute", "memory", "links"});
  for (const char* section : {"compute", "memory"}) {
    const toml::table* table = read.table(root, section, section);
    std::vector<std::string> known;
    for (const Number& n : numbers(h)) {
      if (std::string(n.section) != section) continue;
      known.emplace_back(n.key);
      const std::string shown = fmt::format("{}.{}", section, n.key);
      if (!read.number(table, n.key, shown, n.range, n.target) && n.range.needed)
        read.fail(nullptr, shown, fmt::format("is missing: {}", n.doc));
    }
    if (table != nullptr) read.only(*table, section, known);
  }
  const toml::table* links = read.table(root, "links", "links");
  if (links == nullptr) read.fail(nullptr, "links", "is missing: bandwidth and latency between ranks");
  std::vector<std::string> known = {"overlap", "bandwidth", "latency"};
  for (const Axis& axis : axes(h)) known.emplace_back(axis.name);
  read.only(*links, "links", known);
  if (const toml::node* node = links->get("overlap")) {
    if (!node->is_boolean())
      read.fail(node, fmt::format("links.overlap = {}", given(*node)), "allowed: true or false");
    h.overlap = *node->value<bool>();
  }
  Link all;
  const bool has_all = read.number(links, "bandwidth", "links.bandwidth", kRate, &all.bandwidth);
  read.number(links, "latency", "links.latency", kSeconds, &all.latency);
  for (const Axis& axis : axes(h)) {
    const std::string section = fmt::format("links.{}", axis.name);
    const toml::table* table = read.table(*links, axis.name, section);
    if (table != nullptr) read.only(*table, section, {"bandwidth", "latency"});
    *axis.link = all;
    if (!read.number(table, "bandwidth", section + ".bandwidth", kRate, &axis.link->bandwidth) && !has_all)
      read.fail(table, section + ".bandwidth", "is missing: bytes/s into a rank");
    read.number(table, "latency", section + ".latency", kSeconds, &axis.link->latency);
  }
  return h;
}

Hardware Hardware::load(const std::filesystem::path& file) {
  std::error_code error;
  const auto size = std::filesystem::file_size(file, error);
  std::ifstream in(file, std::ios::binary);
  if (error || !in) throw BadConfig("{}: cannot be read", file.string());
  if (size > kMostBytes)
    throw BadConfig("{}: {} bytes, a hardware file has at most {}", file.string(), size, kMostBytes);
  std::ostringstream text;
  text << in.rdbuf();
  return parse(text.str(), file.string());
}

std::string Hardware::toml(const std::string& comment) const {
  Hardware copy = *this;
  std::string out = comment;
  std::string section;
  for (const Number& n : numbers(copy)) {
    if (section != n.section) out += fmt::format("\n[{}]\n", section = n.section);
    out += fmt::format("{} = {:.6g}  # {}\n", n.key, *n.target, n.doc);
  }
  out += fmt::format("\n[links]\noverlap = {}  # transfers go on beside compute\n", overlap);
  for (const Axis& axis : axes(copy))
    out += fmt::format(
        "\n[links.{}]\nbandwidth = {:.6g}  # bytes/s into a rank\nlatency = {:.6g}  # seconds of a "
        "collective\n",
        axis.name, axis.link->bandwidth, axis.link->latency);
  return out;
}

}  // namespace titanium

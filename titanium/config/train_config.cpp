// From TOML and overrides to a TrainConfig.
#include "titanium/config/train_config.h"

#include <toml++/toml.h>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <map>

#include "titanium/base/error.h"
#include "titanium/config/nearest.h"
#include "titanium/config/toml_guard.h"
#include "titanium/config/train_config_fields.h"
#include "titanium/config/utf8.h"
#include "titanium/formats/json.h"

namespace titanium {
namespace {

constexpr uint64_t kMostBytes = 1 << 20;

// "run.toml:12" or the override, and the key, for messages.
struct Place {
  std::string where;
  std::string key;  // "[optimizer] lr"
};

std::string bracketed(std::string_view section, std::string_view key) {
  return section.empty() ? std::string(key) : fmt::format("[{}] {}", section, key);
}

[[noreturn]] void refuse(const Place& place, const std::string& given, const std::string& allowed) {
  throw BadConfig("{}: {} = {}: allowed: {}", place.where, place.key, given, allowed);
}

void check_string(const std::string& text, const Place& place) {
  if (!is_utf8(text)) throw BadConfig("{}: {}: not UTF-8", place.where, place.key);
  if (text.find('\0') != std::string::npos)
    throw BadConfig("{}: {}: holds a NUL character", place.where, place.key);
}

// The last check every value passes, wherever it comes from.
void set(const Field& field, FieldValue value, const Place& place, const std::string& given) {
  if (const auto* number = std::get_if<double>(&value); number != nullptr && !std::isfinite(*number)) {
    refuse(place, given, "a finite number");
  }
  if (const auto* text = std::get_if<std::string>(&value)) check_string(*text, place);
  if (const auto* list = std::get_if<std::vector<std::string>>(&value)) {
    for (const std::string& text : *list) check_string(text, place);
  }
  if (!field.check.ok(value)) refuse(place, given, field.allowed());
  field.assign(value);
}

// --- TOML ---

std::string given_text(const toml::node& node, const GuardedToml& toml) {
  constexpr size_t kLongest = 80;
  if (const auto* text = node.as_string()) return toml_text(toml.restore(text->get()));
  if (node.is_table()) return "a table";
  if (node.is_array()) return "a list";
  std::ostringstream out;
  node.visit([&](const auto& value) {
    if constexpr (toml::is_value<decltype(value)>) out << value;
  });
  return out.str().substr(0, kLongest);
}

struct FromToml {
  const toml::node& node;
  const Field& field;
  const GuardedToml& toml;

  std::optional<FieldValue> operator()(const bool*) const {
    const auto* value = node.as_boolean();
    return value == nullptr ? std::nullopt : std::optional<FieldValue>(value->get());
  }
  std::optional<FieldValue> operator()(const int64_t*) const {
    const auto* value = node.as_integer();
    return value == nullptr ? std::nullopt : std::optional<FieldValue>(value->get());
  }
  std::optional<FieldValue> operator()(const double*) const {
    if (const auto* value = node.as_floating_point()) return value->get();
    if (const auto* value = node.as_integer()) return static_cast<double>(value->get());
    return std::nullopt;
  }
  std::optional<FieldValue> operator()(const std::string*) const {
    if (const auto* value = node.as_string()) return toml.restore(value->get());
    const auto* number = node.as_integer();
    if (number != nullptr && field.check.takes_integer) return std::to_string(number->get());
    return std::nullopt;
  }
  std::optional<FieldValue> operator()(const Dtype*) const {
    const auto* value = node.as_string();
    const auto dtype = value == nullptr ? std::nullopt : parse_dtype(value->get());
    return dtype ? std::optional<FieldValue>(*dtype) : std::nullopt;
  }
  std::optional<FieldValue> operator()(const std::vector<std::string>*) const {
    std::vector<std::string> out;
    if (const auto* value = node.as_string()) return std::vector<std::string>{toml.restore(value->get())};
    const auto* list = node.as_array();
    if (list == nullptr) return std::nullopt;
    for (const toml::node& entry : *list) {
      const auto* text = entry.as_string();
      if (text == nullptr) return std::nullopt;
      out.push_back(toml.restore(text->get()));
    }
    return out;
  }
};

// --- keys ---

std::string list_of(const std::vector<std::string>& names) {
  std::string out;
  for (const std::string& name : names) out += (out.empty() ? "" : ", ") + name;
  return out;
}

[[noreturn]] void refuse_unknown(const std::vector<Section>& table, const std::string& where,
                                 const std::string& section, const std::string& key) {
  for (const LackingKey& lacking : lacking_keys()) {
    if (lacking.section == section && (lacking.key == key || lacking.key.empty())) {
      throw BadConfig("{}: {}: titanium has no such key: {}", where, bracketed(section, key), lacking.reason);
    }
  }
  const auto found =
      std::find_if(table.begin(), table.end(), [&](const Section& s) { return s.name == section; });
  if (found == table.end()) {
    std::vector<std::string> names;
    for (const Section& known : table) {
      if (!known.name.empty()) names.push_back(known.name);
    }
    const std::string near = nearest(section, names);
    throw BadConfig("{}: unknown section [{}]{}; sections: {}", where, section,
                    near.empty() ? "" : fmt::format(", did you mean [{}]?", near), list_of(names));
  }
  std::vector<std::string> names;
  for (const Field& field : found->fields) names.push_back(field.name);
  std::string near = nearest(key, names);
  if (near.empty()) {  // right key, wrong section
    for (const Section& other : table) {
      for (const Field& field : other.fields) {
        if (field.name == key) near = key_name(other.name, key);
      }
    }
  }
  const std::string of = section.empty() ? "keys outside sections" : fmt::format("keys of [{}]", section);
  throw BadConfig("{}: unknown key {}{}; {}: {}", where, bracketed(section, key),
                  near.empty() ? "" : fmt::format(", did you mean {}?", near), of, list_of(names));
}

const Field& find_field(const std::vector<Section>& table, const std::string& where,
                        const std::string& section, const std::string& key) {
  for (const Section& known : table) {
    if (known.name != section) continue;
    for (const Field& field : known.fields) {
      if (field.name == key) return field;
    }
  }
  refuse_unknown(table, where, section, key);
}

toml::table parse_toml(const GuardedToml& toml, const std::string& source) {
  try {
    return toml::parse(toml.text(), source);
  } catch (const toml::parse_error& error) {
    throw BadConfig("{}:{}: not TOML: {}", source, error.source().begin.line,
                    toml.restore(error.description()));
  }
}

class FileReader {
 public:
  FileReader(const std::vector<Section>& table, const GuardedToml& toml, std::string source)
      : table_(table), toml_(toml), source_(std::move(source)) {}

  void read() {
    const toml::table root = parse_toml(toml_, source_);
    for (const auto& [key, node] : root) {
      const std::string name = toml_.restore(key.str());
      if (const toml::table* section = node.as_table()) {
        if (section->empty()) check_section(where(key), name);
        for (const auto& [inner, value] : *section) read_key(name, inner, value);
      } else {
        read_key("", key, node);
      }
    }
  }

 private:
  std::string where(const toml::key& key) const {
    return fmt::format("{}:{}", source_, key.source().begin.line);
  }

  void check_section(const std::string& where, const std::string& name) const {
    for (const Section& known : table_) {
      if (known.name == name && !name.empty()) return;
    }
    refuse_unknown(table_, where, name, "");
  }

  void read_key(const std::string& section, const toml::key& key, const toml::node& node) {
    const std::string name = toml_.restore(key.str());
    const Place place{where(key), bracketed(section, name)};
    // A section name with a value in place of a table deserves its own words.
    if (section.empty()) {
      for (const Section& known : table_) {
        if (!known.name.empty() && known.name == name)
          throw BadConfig("{}: {} is a section: [{}]", place.where, name, name);
      }
    }
    const Field& field = find_field(table_, place.where, section, name);
    const std::string given = given_text(node, toml_);
    const std::optional<FieldValue> value = std::visit(FromToml{node, field, toml_}, field.target);
    if (!value) refuse(place, given, field.allowed());
    set(field, *value, place, given);

    const std::string full = key_name(section, name);
    const auto [before, fresh] = seen_.emplace(field.alias_of.empty() ? full : field.alias_of, full);
    if (!fresh) throw BadConfig("{}: {} and {} are one key: give it once", place.where, before->second, full);
  }

  const std::vector<Section>& table_;
  const GuardedToml& toml_;
  std::string source_;
  std::map<std::string, std::string> seen_;
};

// --- overrides ---

std::optional<FieldValue> parse_integer(std::string_view text) {
  int64_t value{};
  const auto result = std::from_chars(text.data(), text.data() + text.size(), value);
  if (result.ec != std::errc() || result.ptr != text.data() + text.size()) return std::nullopt;
  return value;
}

std::optional<FieldValue> parse_list(std::string_view text) {
  std::vector<std::string> out;
  if (text.starts_with('[')) {
    Json list;
    std::string why;
    // Strings in a TOML list on one line are written as in JSON.
    if (!try_parse_json(text, {}, &list, &why)) return std::nullopt;
    for (const Json& entry : list) {
      if (!entry.is_string()) return std::nullopt;
      out.push_back(entry.get<std::string>());
    }
    return out;
  }
  if (text.empty()) return out;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    out.emplace_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return out;
}

struct FromText {
  std::string_view text;

  std::optional<FieldValue> operator()(const bool*) const {
    if (text == "true") return true;
    if (text == "false") return false;
    return std::nullopt;
  }
  std::optional<FieldValue> operator()(const int64_t*) const { return parse_integer(text); }
  std::optional<FieldValue> operator()(const double*) const {
    double value{};
    const auto result = std::from_chars(text.data(), text.data() + text.size(), value);
    if (result.ptr != text.data() + text.size()) return std::nullopt;
    // Too large or too small to be told apart from infinity or 0, which have words of their own.
    if (result.ec == std::errc::result_out_of_range) return std::strtod(std::string(text).c_str(), nullptr);
    return result.ec == std::errc() ? std::optional<FieldValue>(value) : std::nullopt;
  }
  std::optional<FieldValue> operator()(const std::string*) const { return std::string(text); }
  std::optional<FieldValue> operator()(const std::vector<std::string>*) const { return parse_list(text); }
  std::optional<FieldValue> operator()(const Dtype*) const {
    const auto dtype = parse_dtype(text);
    return dtype ? std::optional<FieldValue>(*dtype) : std::nullopt;
  }
};

// `seen`: key -> the name under which an override gave it.
void apply_override(const std::vector<Section>& table, const std::string& argument,
                    std::map<std::string, std::string>& seen) {
  std::string_view text = argument;
  if (text.starts_with("--")) text.remove_prefix(2);
  const size_t equals = text.find('=');
  if (equals == std::string_view::npos || equals == 0) {
    throw BadConfig("{}: allowed: --section.key=value", argument);
  }
  const std::string_view name = text.substr(0, equals), given = text.substr(equals + 1);
  const size_t dot = name.find('.');
  const std::string section(dot == std::string_view::npos ? "" : name.substr(0, dot));
  const std::string key(dot == std::string_view::npos ? name : name.substr(dot + 1));

  const Place place{fmt::format("--{}", name), bracketed(section, key)};
  const Field& field = find_field(table, place.where, section, key);
  const std::optional<FieldValue> value = std::visit(FromText{given}, field.target);
  if (!value) refuse(place, toml_text(std::string(given)), field.allowed());
  set(field, *value, place, toml_text(std::string(given)));
  // The last one wins, but two names of a key in one command are a slip.
  const auto [before, fresh] =
      seen.emplace(field.alias_of.empty() ? std::string(name) : field.alias_of, name);
  if (!fresh && before->second != name)
    throw BadConfig("--{} and --{} are one key: give it once", before->second, name);
}

}  // namespace

TrainConfig parse_train_config(std::string_view toml, const std::string& source,
                               const std::vector<std::string>& overrides) {
  TrainConfig config;
  const std::vector<Section> table = describe(config);
  if (toml.size() > kMostBytes) {
    throw BadConfig("{}: {} bytes, at most {} allowed", source, toml.size(), kMostBytes);
  }
  const GuardedToml guarded(toml, source);
  FileReader(table, guarded, source).read();
  std::map<std::string, std::string> seen;
  for (const std::string& argument : overrides) apply_override(table, argument, seen);
  check_together(config);
  return config;
}

TrainConfig load_train_config(const std::optional<std::filesystem::path>& file,
                              const std::vector<std::string>& overrides) {
  if (!file) return parse_train_config("", "", overrides);
  return parse_train_config(read_file(*file, kMostBytes), file->string(), overrides);
}

}  // namespace titanium

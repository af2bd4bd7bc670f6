// The table of keys as TOML, as help and as a page.
#include "titanium/base/error.h"
#include "titanium/config/train_config_fields.h"

namespace titanium {
namespace {

std::string toml_string(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (c == '\n') {
      out += "\\n";
    } else if (c == '\t') {
      out += "\\t";
    } else if (byte < 0x20 || byte == 0x7f) {
      out += fmt::format("\\u{:04X}", byte);
    } else {
      out += c;
    }
  }
  return out + '"';
}

struct AsToml {
  std::string operator()(bool x) const { return x ? "true" : "false"; }
  std::string operator()(int64_t x) const { return std::to_string(x); }
  std::string operator()(double x) const {
    std::string text = fmt::format("{}", x);  // the shortest text that reads back as x
    if (text.find_first_of(".e") == std::string::npos) text += ".0";
    return text;
  }
  std::string operator()(const std::string& x) const { return toml_string(x); }
  std::string operator()(const std::vector<std::string>& x) const {
    std::string text;
    for (const std::string& entry : x) text += (text.empty() ? "" : ", ") + toml_string(entry);
    return "[" + text + "]";
  }
  std::string operator()(Dtype x) const { return toml_string(torch_name(x)); }
};

std::string doc_of(const Field& field) {
  return field.alias_of.empty() ? field.doc : fmt::format("another name of {}", field.alias_of);
}

}  // namespace

std::string toml_text(const FieldValue& value) {
  return std::visit(AsToml{}, value);
}

std::string print_train_config(const TrainConfig& config) {
  TrainConfig copy = config;
  std::string out;
  for (const Section& section : describe(copy)) {
    if (!section.name.empty()) out += fmt::format("\n[{}]\n", section.name);
    for (const Field& field : section.fields) {
      if (field.alias_of.empty()) out += fmt::format("{} = {}\n", field.name, toml_text(field.value()));
    }
  }
  return out;
}

std::map<std::string, std::string> config_values(const TrainConfig& config) {
  TrainConfig copy = config;
  std::map<std::string, std::string> values;
  for (const Section& section : describe(copy)) {
    for (const Field& field : section.fields) {
      if (field.alias_of.empty()) values[key_name(section.name, field.name)] = toml_text(field.value());
    }
  }
  return values;
}

std::string config_help() {
  TrainConfig defaults;
  std::string out = "Keys of run.toml; on the command line --section.key=value.\n";
  for (const Section& section : describe(defaults)) {
    out += section.name.empty() ? fmt::format("\n{}\n", section.doc)
                                : fmt::format("\n[{}]  {}\n", section.name, section.doc);
    for (const Field& field : section.fields) {
      out += fmt::format("  {} = {}\n", field.name, toml_text(field.value()));
      if (const std::string doc = doc_of(field); !doc.empty()) out += fmt::format("      {}\n", doc);
      out += fmt::format("      allowed: {}\n", field.allowed());
    }
  }
  return out;
}

std::string config_markdown() {
  TrainConfig defaults;
  std::string out =
      "# Configuration\n\n"
      "`titanium train run.toml` reads a TOML file. Any key can be given on the command line too, as "
      "`--section.key=value`; that wins over the file. A list is written `a,b` or `[\"a\", \"b\"]`. "
      "`--print-config` prints the result, which is again a valid file. An unknown key is an error, and so "
      "is a value "
      "that is not allowed.\n\n"
      "Sections and names are those of torchtitan 0.3.0 where it has them. This page is generated from the "
      "table in "
      "`titanium/config/train_config_fields.cpp`.\n";
  for (const Section& section : describe(defaults)) {
    out += section.name.empty() ? "\n## Outside sections\n" : fmt::format("\n## [{}]\n", section.name);
    out += fmt::format("\n{}\n\n| key | default | allowed | meaning |\n|---|---|---|---|\n", section.doc);
    for (const Field& field : section.fields) {
      out += fmt::format("| `{}` | `{}` | {} | {} |\n", field.name, toml_text(field.value()), field.allowed(),
                         doc_of(field));
    }
  }
  out +=
      "\n## Keys of torchtitan that titanium does not have\n\nThey are refused with these words.\n\n| key | "
      "instead |\n|---|---|\n";
  for (const LackingKey& lacking : lacking_keys()) {
    const std::string name =
        lacking.key.empty() ? fmt::format("[{}]", lacking.section) : key_name(lacking.section, lacking.key);
    out += fmt::format("| `{}` | {} |\n", name, lacking.reason);
  }
  return out;
}

}  // namespace titanium

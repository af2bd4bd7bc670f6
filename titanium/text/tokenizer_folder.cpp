// The files of a Hugging Face folder that lie beside tokenizer.json.
#include <algorithm>

#include "titanium/base/error.h"
#include "titanium/formats/json.h"
#include "titanium/text/tokenizer_impl.h"

namespace titanium {
namespace {

namespace fs = std::filesystem;

// An empty object if the file is not there.
Json read_optional(const fs::path& path) {
  if (!fs::exists(path)) return Json::object();
  Json json = read_json(path);
  if (!json.is_object()) throw BadConfig("{}: an object is expected", path.string());
  return json;
}

bool has(const Json& json, const char* key) {
  return json.contains(key) && !json[key].is_null();
}

// A token is written as text, or as an object with its content.
std::string token_text(const Json& json, const char* key, const fs::path& file) {
  const Json& value = json[key];
  if (value.is_string()) return value.get<std::string>();
  if (value.is_object() && value.contains("content") && value["content"].is_string())
    return value["content"].get<std::string>();
  throw BadConfig("{}: {} is {}; a text or an object with content is expected", file.string(), key,
                  value.dump());
}

// Added tokens that only tokenizer_config.json knows.
void read_added_tokens(const Json& config, const fs::path& file, Tokenizer::Impl& impl) {
  if (!has(config, "added_tokens_decoder")) return;
  const Json& table = config["added_tokens_decoder"];
  if (!table.is_object())
    throw BadConfig("{}: added_tokens_decoder is {}; an object is expected", file.string(), table.dump());
  const ByteAlphabet alphabet;
  for (const auto& [key, entry] : table.items()) {
    const std::string where = file.string() + ": added_tokens_decoder." + key;
    AddedToken token;
    if (key.empty() || key.size() > 7 ||
        !std::all_of(key.begin(), key.end(), [](char c) { return c >= '0' && c <= '9'; }) ||
        (token.id = std::stoll(key)) > kMaxTokenId)
      throw BadConfig("{}: an id from 0 to {} is expected", where, kMaxTokenId);
    if (!entry.is_object() || !entry.contains("content") || !entry["content"].is_string())
      throw BadConfig("{} has no text content", where);
    token.content = entry["content"].get<std::string>();
    const auto known = impl.ids.find(token.content);
    if (known != impl.ids.end() && known->second == token.id) continue;  // tokenizer.json has it
    auto flag = [&, &entry = entry](const char* name, bool otherwise) {  // clang 14 captures no bindings
      if (!has(entry, name)) return otherwise;
      if (!entry[name].is_boolean())
        throw BadConfig("{}.{} is {}; true or false is expected", where, name, entry[name].dump());
      return entry[name].get<bool>();
    };
    token.special = flag("special", false);
    token.single_word = flag("single_word", false);
    token.lstrip = flag("lstrip", false);
    token.rstrip = flag("rstrip", false);
    token.normalized = flag("normalized", !token.special);
    impl.add_added_token(token, alphabet, where);
  }
}

std::optional<int64_t> special_id(const Json& config, const fs::path& config_file, const Json& map,
                                  const fs::path& map_file, const char* key, const Tokenizer::Impl& impl) {
  const bool in_config = has(config, key);
  if (!in_config && !has(map, key)) return std::nullopt;
  const fs::path& file = in_config ? config_file : map_file;
  const std::string text = token_text(in_config ? config : map, key, file);
  const auto found = impl.ids.find(text);
  if (found == impl.ids.end())
    throw BadConfig("{}: {} '{}' is not a token of {}", file.string(), key, text, impl.name);
  return found->second;
}

// generation_config.json decides; without it config.json, whose list may hold more than the tokenizer's one
// eos.
std::vector<int64_t> stop_ids(const fs::path& folder, const Tokenizer::Impl& impl) {
  const fs::path model_file = folder / "config.json";
  const Json model = read_optional(model_file);
  fs::path file = folder / "generation_config.json";
  Json json = read_optional(file);
  if (!has(json, "eos_token_id")) {
    file = model_file;
    json = model;
  }
  if (!has(json, "eos_token_id")) {
    if (impl.special.eos) return {*impl.special.eos};
    return {};
  }
  // An id that the model cannot draw would never stop it.
  int64_t last = kMaxTokenId;
  if (has(model, "vocab_size") && model["vocab_size"].is_number_unsigned())
    last = static_cast<int64_t>(std::min(model["vocab_size"].get<uint64_t>(), uint64_t{kMaxTokenId} + 1)) - 1;
  const Json& value = json["eos_token_id"];
  std::vector<int64_t> out;
  for (const Json& id : value.is_array() ? value : Json::array({value})) {
    if (!id.is_number_integer() || id.get<double>() < 0 || id.get<double>() > static_cast<double>(last))
      throw BadConfig("{}: eos_token_id is {}; ids from 0 to {} are expected{}", file.string(), value.dump(),
                      last, last < kMaxTokenId ? ", below vocab_size of " + model_file.string() : "");
    out.push_back(id.get<int64_t>());
  }
  return out;
}

std::map<std::string, std::string> read_templates(const fs::path& folder, const Json& config) {
  std::map<std::string, std::string> out;
  const fs::path single = folder / "chat_template.jinja", more = folder / "additional_chat_templates";
  constexpr uint64_t kLargest = 1 << 20;
  if (fs::exists(single)) out["default"] = read_file(single, kLargest);
  if (fs::is_directory(more))
    for (const auto& entry : fs::directory_iterator(more))
      if (entry.path().extension() == ".jinja")
        out[entry.path().stem().string()] = read_file(entry.path(), kLargest);
  if (!out.empty() || !has(config, "chat_template")) return out;

  const Json& value = config["chat_template"];
  const std::string where = (folder / "tokenizer_config.json").string() + ": chat_template";
  if (value.is_string()) {
    out["default"] = value.get<std::string>();
  } else if (value.is_array()) {
    for (const Json& entry : value) {
      if (!entry.is_object() || !entry.contains("name") || !entry["name"].is_string() ||
          !entry.contains("template") || !entry["template"].is_string())
        throw BadConfig("{}: a list of objects with the texts name and template is expected", where);
      out[entry["name"].get<std::string>()] = entry["template"].get<std::string>();
    }
  } else {
    throw BadConfig("{}: a text or a list is expected", where);
  }
  return out;
}

}  // namespace

Tokenizer Tokenizer::from_folder(const fs::path& folder) {
  auto impl = std::make_unique<Impl>();
  const fs::path file = folder / "tokenizer.json", config_file = folder / "tokenizer_config.json",
                 map_file = folder / "special_tokens_map.json";
  read_tokenizer_json(read_file(file), file.string(), *impl);
  const Json config = read_optional(config_file), map = read_optional(map_file);
  read_added_tokens(config, config_file, *impl);
  auto special = [&](const char* key) { return special_id(config, config_file, map, map_file, key, *impl); };
  impl->special.bos = special("bos_token");
  impl->special.eos = special("eos_token");
  impl->special.pad = special("pad_token");
  impl->special.unk = special("unk_token");
  for (const std::optional<int64_t> id :
       {impl->special.bos, impl->special.eos, impl->special.pad, impl->special.unk})
    if (id) impl->tokens[static_cast<size_t>(*id)].special = true;
  impl->special.stop = stop_ids(folder, *impl);

  impl->chat_templates = read_templates(folder, config);
  return Tokenizer(std::move(impl));
}

}  // namespace titanium

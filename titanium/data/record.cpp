#include "titanium/data/record.h"

#include <algorithm>
#include <utility>

#include "titanium/formats/json.h"

namespace titanium {
namespace {

constexpr std::pair<RecordForm, const char*> kForms[] = {
    {RecordForm::kAuto, "auto"},
    {RecordForm::kMessages, "messages"},
    {RecordForm::kPromptResponse, "prompt_response"},
    {RecordForm::kText, "text"},
    {RecordForm::kInputIds, "input_ids"},
};

// The fields of each form.
constexpr std::pair<RecordForm, std::string_view> kFields[] = {
    {RecordForm::kMessages, "messages"},       {RecordForm::kPromptResponse, "prompt"},
    {RecordForm::kPromptResponse, "response"}, {RecordForm::kText, "text"},
    {RecordForm::kInputIds, "input_ids"},      {RecordForm::kInputIds, "loss_mask"},
};

// A value in a message: numbers as they are, anything longer by its type.
std::string shown(const Json& value) {
  return value.is_number() || value.is_boolean() ? value.dump() : fmt::format("a JSON {}", value.type_name());
}

// One record being read: the object, and how to complain about it.
class Reader {
 public:
  Reader(const Json& object, const std::string& where) : object_(object), where_(where) {}

  [[noreturn]] void fail(const std::string& what) const {
    throw BadRecord(Reject::kField, fmt::format("{}: {}", where_, what));
  }

  // Null counts as absent: exporters write it for the columns that a record does not have.
  const Json* find(std::string_view field) const {
    const auto at = object_.find(field);
    return at == object_.end() || at->is_null() ? nullptr : &*at;
  }
  const Json& need(std::string_view field) const {
    const Json* value = find(field);
    if (!value) fail(fmt::format("field '{}' is missing", field));
    return *value;
  }
  std::string text(std::string_view field) const {
    const Json& value = need(field);
    if (!value.is_string()) fail(fmt::format("field '{}' is {}, not a text", field, value.type_name()));
    return value.get<std::string>();
  }

  RecordForm find_form() const {
    std::string found;
    RecordForm form = RecordForm::kAuto;
    bool several = false;
    for (const auto& [of, field] : kFields) {
      if (!find(field)) continue;
      found += fmt::format("{}'{}'", found.empty() ? "" : ", ", field);
      several = several || (form != RecordForm::kAuto && form != of);
      form = of;
    }
    if (form == RecordForm::kAuto) {
      fail("none of the fields 'messages', 'prompt' and 'response', 'text', 'input_ids'");
    }
    if (several) {
      fail(fmt::format("fields {} belong to more than one form of record; set the format to choose one",
                       found));
    }
    return form;
  }

 private:
  const Json& object_;
  const std::string& where_;
};

// The text of a message's content: itself, or the texts of its list joined.
std::string content_text(const ChatJson& content, const std::string& name, const Reader& in) {
  if (content.is_string()) return content.get<std::string>();
  if (!content.is_array()) {
    in.fail(fmt::format("field '{}' is {}, not a text or a list of texts", name, content.type_name()));
  }
  std::string text;
  for (size_t i = 0; i < content.size(); ++i) {
    const ChatJson& part = content[i];
    const std::string part_name = fmt::format("{}[{}]", name, i);
    if (!part.is_object() || !part.contains("type") || !part["type"].is_string()) {
      in.fail(fmt::format("field '{}' is not an object with a 'type'", part_name));
    }
    if (part["type"].get<std::string>() != "text") {
      in.fail(fmt::format("field '{}.type' is not 'text', the only type allowed", part_name));
    }
    if (!part.contains("text") || !part["text"].is_string()) {
      in.fail(fmt::format("field '{}.text' is not a text", part_name));
    }
    text += part["text"].get<std::string>();
  }
  return text;
}

// A call without the name of a function would leave no trace in the rendered chat.
void check_calls(const ChatJson& calls, const std::string& name, const Reader& in) {
  if (calls.is_null()) return;
  if (!calls.is_array()) in.fail(fmt::format("field '{}' is {}, not a list", name, calls.type_name()));
  for (size_t i = 0; i < calls.size(); ++i) {
    const auto named = [](const ChatJson& object) {
      return object.is_object() && object.contains("name") && object["name"].is_string();
    };
    const ChatJson& call = calls[i];
    if (!named(call) && !(call.is_object() && call.contains("function") && named(call["function"])))
      in.fail(fmt::format("field '{}[{}]' names no function", name, i));
  }
}

ChatJson messages(ChatJson list, std::string_view field, const Reader& in) {
  if (!list.is_array() || list.empty()) {
    in.fail(fmt::format("field '{}' is not a list with at least one message", field));
  }
  for (size_t i = 0; i < list.size(); ++i) {
    ChatJson& message = list[i];
    const std::string name = fmt::format("{}[{}]", field, i);
    if (!message.is_object()) {
      in.fail(fmt::format("field '{}' is {}, not an object", name, message.type_name()));
    }
    if (!message.contains("role") || !message["role"].is_string()) {
      in.fail(fmt::format("field '{}.role' is not a text", name));
    }
    if (message.contains("tool_calls")) check_calls(message["tool_calls"], name + ".tool_calls", in);
    if (!message.contains("content") || message["content"].is_null()) {
      // An assistant that only calls tools says nothing.
      if (!message.contains("tool_calls") || !message["tool_calls"].is_array()) {
        in.fail(fmt::format("field '{}.content' is missing", name));
      }
    } else {
      message["content"] = content_text(message["content"], name + ".content", in);
    }
  }
  return list;
}

ChatJson tools(const ChatJson& object, const Reader& in) {
  if (!in.find("tools")) return {};
  if (!object["tools"].is_array()) in.fail("field 'tools' is not a list");
  return object["tools"];
}

void read_ids(const Reader& in, int64_t vocab_size, Record& out) {
  const Json& ids = in.need("input_ids");
  if (!ids.is_array()) in.fail(fmt::format("field 'input_ids' is {}, not a list", ids.type_name()));
  out.ids.reserve(ids.size());
  for (size_t i = 0; i < ids.size(); ++i) {
    const Json& id = ids[i];
    // -0 is an integer, but none without a sign.
    const bool fits = (id.is_number_unsigned() && id.get<uint64_t>() < static_cast<uint64_t>(vocab_size)) ||
                      (id.is_number_integer() && id.get<int64_t>() == 0);
    if (!fits) {
      in.fail(fmt::format("field 'input_ids[{}]' is {}, not an id in [0, {})", i, shown(id), vocab_size));
    }
    out.ids.push_back(static_cast<int32_t>(id.get<uint64_t>()));
  }
  // Other programs' fields that say what this one would get wrong by leaving them out.
  if (in.find("labels")) {
    in.fail("field 'labels' is not read here: which tokens have loss is said by 'loss_mask', 0 or 1 a token");
  }
  if (const Json* attention = in.find("attention_mask")) {
    const bool ones = attention->is_array() && std::all_of(attention->begin(), attention->end(),
                                                           [](const Json& bit) { return bit == Json(1); });
    if (!ones) in.fail("field 'attention_mask' is not a list of ones: leave padding out of 'input_ids'");
  }
  const Json* mask = in.find("loss_mask");
  if (!mask) {
    out.loss_mask.assign(out.ids.size(), 1);
    return;
  }
  if (!mask->is_array()) in.fail(fmt::format("field 'loss_mask' is {}, not a list", mask->type_name()));
  if (mask->size() != out.ids.size()) {
    in.fail(fmt::format("field 'loss_mask' has {} entries, 'input_ids' {}", mask->size(), out.ids.size()));
  }
  out.loss_mask.reserve(mask->size());
  for (size_t i = 0; i < mask->size(); ++i) {
    const Json& bit = (*mask)[i];
    if (!bit.is_number_unsigned() || bit.get<uint64_t>() > 1) {
      in.fail(fmt::format("field 'loss_mask[{}]' is {}, not 0 or 1", i, shown(bit)));
    }
    out.loss_mask.push_back(static_cast<uint8_t>(bit.get<uint64_t>()));
  }
}

}  // namespace

const char* name(RecordForm form) {
  for (const auto& [value, text] : kForms) {
    if (value == form) return text;
  }
  throw Bug("no such form of record: {}", static_cast<int>(form));
}

RecordForm record_form_from(std::string_view name) {
  std::string allowed;
  for (const auto& [value, text] : kForms) {
    if (name == text) return value;
    allowed += (allowed.empty() ? "" : ", ") + std::string(text);
  }
  throw BadConfig("'{}' is not a form of record; allowed: {}", name, allowed);
}

const char* name(Reject reason) {
  switch (reason) {
    case Reject::kJson:
      return "json";
    case Reject::kField:
      return "field";
    case Reject::kText:
      return "text";
    case Reject::kEmpty:
      return "empty";
    case Reject::kLength:
      return "length";
  }
  throw Bug("no such reason: {}", static_cast<int>(reason));
}

Record parse_record(std::string_view line, RecordForm form, int64_t vocab_size, const std::string& where) {
  Json json;
  std::string why;
  if (!try_parse_json(line, {}, &json, &why)) {
    throw BadRecord(Reject::kJson, fmt::format("{}: not valid JSON: {}", where, why));
  }
  if (!json.is_object()) {
    throw BadRecord(Reject::kJson, fmt::format("{}: a JSON {}, not an object", where, json.type_name()));
  }
  const Reader in(json, where);
  Record out;
  out.form = form == RecordForm::kAuto ? in.find_form() : form;

  // Chat templates may print keys in the order of the file (tojson), which Json does not keep.
  const auto ordered = [&] { return ChatJson::parse(line.begin(), line.end()); };
  switch (out.form) {
    case RecordForm::kMessages: {
      in.need("messages");
      const ChatJson object = ordered();
      out.messages = messages(object["messages"], "messages", in);
      out.tools = tools(object, in);
      break;
    }
    case RecordForm::kPromptResponse:
      out.response = in.text("response");
      if (in.need("prompt").is_array()) {
        const ChatJson object = ordered();
        out.messages = messages(object["prompt"], "prompt", in);
        out.tools = tools(object, in);
        out.messages.push_back({{"role", "assistant"}, {"content", out.response}});
      } else {
        out.prompt = in.text("prompt");
      }
      break;
    case RecordForm::kText:
      out.text = in.text("text");
      break;
    case RecordForm::kInputIds:
      read_ids(in, vocab_size, out);
      break;
    case RecordForm::kAuto:
      throw Bug("a record's form was not found");
  }
  return out;
}

}  // namespace titanium

#include "titanium/text/chat_template.h"

#include "titanium/base/error.h"
#include "titanium/text/template_render.h"

namespace titanium {

struct ChatTemplate::Impl {
  std::string name;
  jinja::Tree tree;
};

namespace {

// As transformers 5 does: keys without a value go, and reasoning gets the two names that templates read.
ChatJson normalized(const ChatJson& message) {
  ChatJson out = ChatJson::object();
  const ChatJson* reasoning = nullptr;
  for (const char* key : {"reasoning_content", "thinking", "reasoning"})
    if (!reasoning && message.contains(key) && !message[key].is_null()) reasoning = &message[key];
  if (reasoning) out["thinking"] = *reasoning;
  for (const auto& [key, value] : message.items())
    if (!value.is_null()) out[key] = value;
  if (reasoning) out["reasoning_content"] = *reasoning;
  return out;
}

}  // namespace

ChatTemplate::ChatTemplate(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}
ChatTemplate::ChatTemplate(ChatTemplate&&) noexcept = default;
ChatTemplate& ChatTemplate::operator=(ChatTemplate&&) noexcept = default;
ChatTemplate::~ChatTemplate() = default;

ChatTemplate ChatTemplate::compile(std::string_view source, const std::string& name) {
  auto impl = std::make_shared<Impl>();
  impl->name = name;
  impl->tree = jinja::parse(source, name);
  return ChatTemplate(std::move(impl));
}

RenderedChat ChatTemplate::render(const ChatInput& input) const {
  if (!input.messages.is_array())
    throw BadData("{}: messages are to be a list, not {}", impl_->name, input.messages.type_name());
  ChatJson messages = ChatJson::array();
  for (size_t i = 0; i < input.messages.size(); ++i) {
    const ChatJson& message = input.messages[i];
    if (!message.is_object())
      throw BadData("{}: messages[{}] is to be an object, not {}", impl_->name, i, message.type_name());
    messages.push_back(normalized(message));
  }
  if (!input.tools.is_null() && !input.tools.is_array())
    throw BadData("{}: tools are to be null or a list, not {}", impl_->name, input.tools.type_name());
  if (!input.variables.is_object())
    throw BadConfig("{}: the variables are to be an object, not {}", impl_->name,
                    input.variables.type_name());

  std::vector<std::pair<std::string, jinja::Value>> variables = {
      {"messages", jinja::from_json(messages)},
      {"tools", jinja::from_json(input.tools)},
      {"documents", jinja::Value(jinja::None{})},
      {"add_generation_prompt", jinja::Value(input.add_generation_prompt)},
  };
  // A token that the tokenizer does not have is not defined.
  if (!input.bos_token.empty()) variables.emplace_back("bos_token", jinja::Value(input.bos_token));
  if (!input.eos_token.empty()) variables.emplace_back("eos_token", jinja::Value(input.eos_token));
  for (const auto& [key, value] : input.variables.items()) {
    std::erase_if(variables, [&, &key = key](const auto& variable) { return variable.first == key; });
    variables.emplace_back(key, jinja::from_json(value));
  }
  jinja::Run run(impl_->name, input.now);
  try {
    return jinja::render(impl_->tree, run, std::move(variables));
  } catch (const BadData& e) {  // values do not know where they are made
    const std::string message = e.what();
    if (message.starts_with(impl_->name + ":")) throw;
    throw BadData("{}:{}: {}", impl_->name, run.line, message);
  }
}

bool ChatTemplate::marks_generation() const {
  return impl_->tree.generation;
}
const std::string& ChatTemplate::name() const {
  return impl_->name;
}

}  // namespace titanium

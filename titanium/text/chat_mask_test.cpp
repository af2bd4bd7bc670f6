#include "titanium/text/chat_mask.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "titanium/base/error.h"
#include "titanium/formats/json.h"

namespace titanium {
namespace {

const std::string kData = std::string(TITANIUM_SOURCE_DIR) + "/tests/data/";

const Tokenizer& smollm() {
  static const Tokenizer tokenizer = Tokenizer::from_folder(kData + "tokenizer");
  return tokenizer;
}
ChatTemplate template_named(const std::string& name) {
  return ChatTemplate::compile(read_file(kData + "text/" + name + ".jinja"), name);
}
ChatJson read_ordered(const std::string& path) {
  return ChatJson::parse(read_file(path));
}

// SmolLM2's vocabulary with other special tokens, BOS by a post-processor, from a folder of its own.
class OtherFamily {
 public:
  OtherFamily(const std::string& bos, const std::string& eos, const std::vector<std::string>& more) {
    folder_ = std::filesystem::path(TITANIUM_BINARY_DIR) / "chat_mask_test";
    std::filesystem::create_directories(folder_);
    Json json = read_json(kData + "tokenizer/tokenizer.json");
    std::vector<std::string> tokens = {bos, eos};
    tokens.insert(tokens.end(), more.begin(), more.end());
    for (const std::string& token : tokens)
      json["added_tokens"].push_back({{"id", 49152 + json["added_tokens"].size()},
                                      {"content", token},
                                      {"special", true},
                                      {"normalized", false}});
    const int64_t bos_id = json["added_tokens"][17]["id"];
    json["post_processor"] = {
        {"type", "TemplateProcessing"},
        {"single",
         {{{"SpecialToken", {{"id", bos}, {"type_id", 0}}}}, {{"Sequence", {{"id", "A"}, {"type_id", 0}}}}}},
        {"pair", Json::array()},
        {"special_tokens", {{bos, {{"id", bos}, {"ids", {bos_id}}, {"tokens", {bos}}}}}}};
    std::ofstream(folder_ / "tokenizer.json") << json.dump();
    std::ofstream(folder_ / "tokenizer_config.json") << Json{{"bos_token", bos}, {"eos_token", eos}}.dump();
  }
  ~OtherFamily() { std::filesystem::remove_all(folder_); }
  Tokenizer tokenizer() const { return Tokenizer::from_folder(folder_); }

 private:
  std::filesystem::path folder_;
};

ChatInput input_of(const Tokenizer& tokenizer, const ChatJson& messages) {
  ChatInput input;
  input.messages = messages;
  input.bos_token = tokenizer.special_text(tokenizer.special().bos);
  input.eos_token = tokenizer.special_text(tokenizer.special().eos);
  return input;
}

// The texts of the learned spans.
std::vector<std::string> learned(const Tokenizer& tokenizer, const ChatTemplate& chat, const ChatInput& input,
                                 const ChatMaskPolicy& policy = {}) {
  const std::string text = chat.render(input).text;
  std::vector<std::string> out;
  for (const ByteSpan& span : assistant_spans(tokenizer, chat, input, policy, "d:1"))
    out.push_back(text.substr(static_cast<size_t>(span.begin), static_cast<size_t>(span.end - span.begin)));
  return out;
}

using Texts = std::vector<std::string>;

TEST(ChatMask, FixturesToTheToken) {
  const ChatTemplate chat = ChatTemplate::compile(read_file(kData + "tokenizer/chat_template.jinja"));
  const ChatJson cases = read_ordered(kData + "tokenizer/chat.json")["conversations"];
  ASSERT_EQ(cases.size(), 8u);
  for (const ChatJson& one : cases) {
    const ChatInput input = input_of(smollm(), one["messages"]);
    MaskedTokens tokens = tokenize_chat(smollm(), chat, input, {}, "chat.json");
    EXPECT_EQ(tokens.ids, one["ids"].get<std::vector<int64_t>>());
    EXPECT_EQ(tokens.loss_mask, one["assistant_mask"].get<std::vector<uint8_t>>()) << one["text"];
    tokens = tokenize_chat(smollm(), chat, input, {.trailing_newline = true}, "chat.json");
    EXPECT_EQ(tokens.loss_mask, one["assistant_mask_with_trailing_newline"].get<std::vector<uint8_t>>())
        << one["text"];
  }
}

TEST(ChatMask, GenerationPromptIsNotLearned) {
  const ChatTemplate chat = template_named("smollm2");
  ChatInput input =
      input_of(smollm(), {{{"role", "user"}, {"content", "a"}}, {{"role", "assistant"}, {"content", "b"}}});
  input.add_generation_prompt = true;
  EXPECT_EQ(learned(smollm(), chat, input), Texts{"b<|im_end|>"});
}

// Content that begins with spaces merges with the newline of the header into one token, which is not learned.
TEST(ChatMask, StraddlingTokenIsNotLearned) {
  const ChatTemplate chat = template_named("smollm2");
  const ChatInput input = input_of(
      smollm(), {{{"role", "user"}, {"content", "a"}}, {{"role", "assistant"}, {"content", "    four"}}});
  const MaskedTokens tokens = tokenize_chat(smollm(), chat, input, {}, "s");
  const Encoding encoding = smollm().encode(chat.render(input).text);
  const ByteSpan span = assistant_spans(smollm(), chat, input, {}, "s").at(0);
  int straddling = 0;
  for (size_t i = 0; i < tokens.ids.size(); ++i) {
    const ByteSpan token = encoding.spans[i];
    straddling += token.begin < span.begin && token.end > span.begin;
    EXPECT_EQ(tokens.loss_mask[i], token.begin >= span.begin && token.end <= span.end);
  }
  EXPECT_EQ(straddling, 1);
}

TEST(ChatMask, LastTurnOnly) {
  const ChatJson messages = read_ordered(kData + "text/renders.json")["chats"]["turns"];
  for (const char* name : {"smollm2", "generation"})
    EXPECT_EQ(learned(smollm(), template_named(name), input_of(smollm(), messages), {.last_turn_only = true}),
              Texts{"世界\n\n<|im_end|>"});
}

TEST(ChatMask, MarkedTemplate) {
  const ChatTemplate chat = template_named("generation");
  const ChatJson messages = read_ordered(kData + "text/renders.json")["chats"]["turns"];
  const ChatInput input = input_of(smollm(), messages);
  EXPECT_EQ(learned(smollm(), chat, input), (Texts{"b<|im_end|>", "世界\n\n<|im_end|>"}));
  EXPECT_EQ(learned(smollm(), chat, input, {.trailing_newline = true}),
            (Texts{"b<|im_end|>\n", "世界\n\n<|im_end|>\n"}));
}

TEST(ChatMask, Qwen) {
  const ChatJson chats = read_ordered(kData + "text/renders.json")["chats"];
  const std::string call =
      "<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"東京\", \"days\": "
      "2}}\n</tool_call>";
  EXPECT_EQ(learned(smollm(), template_named("qwen2.5"), input_of(smollm(), chats["tool"])),
            (Texts{call + "<|im_end|>", "21.5 °C<|im_end|>"}));
  const Texts both = learned(smollm(), template_named("qwen2.5"), input_of(smollm(), chats["two_tools"]));
  ASSERT_EQ(both.size(), 2u);
  EXPECT_TRUE(both[0].starts_with("I look.\n<tool_call>\n") &&
              both[0].ends_with("{}}\n</tool_call><|im_end|>"))
      << both[0];
  EXPECT_EQ(both[1], "Sunny, noon.<|im_end|>");

  const ChatTemplate qwen3 = template_named("qwen3");
  // The last turn is shown with an empty thought, which the model writes itself...
  ChatInput input = input_of(smollm(), chats["turns"]);
  EXPECT_EQ(learned(smollm(), qwen3, input),
            (Texts{"b<|im_end|>", "<think>\n\n</think>\n\n世界\n\n<|im_end|>"}));
  // ...unless the prompt holds it.
  input.variables["enable_thinking"] = false;
  EXPECT_EQ(learned(smollm(), qwen3, input), (Texts{"b<|im_end|>", "世界\n\n<|im_end|>"}));
  // Thoughts of earlier turns are dropped by the template.
  for (const char* name : {"thinking", "reasoning"}) {
    input = input_of(smollm(), chats[name]);
    try {
      learned(smollm(), qwen3, input);
      ADD_FAILURE() << name;
    } catch (const BadData& error) {
      EXPECT_NE(std::string(error.what()).find("d:1: messages[1] (assistant)"), std::string::npos)
          << error.what();
    }
  }
  EXPECT_EQ(learned(smollm(), qwen3, input_of(smollm(), chats["thinking"]), {.last_turn_only = true}),
            Texts{"<think>\nwhy\n\nnot\n</think>\n\nanswer 2<|im_end|>"});
  EXPECT_EQ(learned(smollm(), qwen3, input_of(smollm(), chats["reasoning"]), {.last_turn_only = true}),
            Texts{"<think>\nr2\n</think>\n\na2<|im_end|>"});
}

TEST(ChatMask, Llama3HasOneBos) {
  const Tokenizer tokenizer =
      OtherFamily("<|begin_of_text|>", "<|eot_id|>", {"<|start_header_id|>", "<|end_header_id|>"})
          .tokenizer();
  const ChatTemplate chat = template_named("llama3.1");
  const ChatJson chats = read_ordered(kData + "text/renders.json")["chats"];
  ChatInput input = input_of(tokenizer, chats["system"]);
  EXPECT_EQ(learned(tokenizer, chat, input), Texts{"4<|eot_id|>"});
  const MaskedTokens tokens = tokenize_chat(tokenizer, chat, input, {}, "s");
  EXPECT_EQ(tokens.ids, tokenizer.encode(chat.render(input).text).ids);
  EXPECT_EQ(std::count(tokens.ids.begin(), tokens.ids.end(), *tokenizer.special().bos), 1);
  EXPECT_EQ(tokens.ids[0], *tokenizer.special().bos);
  EXPECT_EQ(std::count(tokens.loss_mask.begin(), tokens.loss_mask.end(), 1), 2);
  input = input_of(tokenizer, chats["tool"]);
  EXPECT_EQ(learned(tokenizer, chat, input),
            (Texts{"{\"name\": \"get_weather\", \"parameters\": {\"city\": \"東京\", \"days\": 2}}<|eot_id|>",
                   "21.5 °C<|eot_id|>"}));

  const MaskedTokens text = tokenize_text(tokenizer, "plain");
  EXPECT_EQ(std::count(text.ids.begin(), text.ids.end(), *tokenizer.special().bos), 1);
  EXPECT_EQ(tokenize_text(tokenizer, "<|begin_of_text|>plain").ids, text.ids);
  EXPECT_EQ(text.loss_mask.front(), 0);
  EXPECT_EQ(text.ids.back(), *tokenizer.special().eos);
  EXPECT_EQ(tokenize_text(tokenizer, "<|begin_of_text|>plain").loss_mask, text.loss_mask);
}

// Templates without a generation prompt: what follows the header must not swallow or lose a token.
TEST(ChatMask, LlamaTwoAndMistral) {
  const Tokenizer tokenizer = OtherFamily("<s>", "</s>", {"[INST]", "[/INST]"}).tokenizer();
  const ChatJson chats = read_ordered(kData + "text/renders.json")["chats"];
  EXPECT_EQ(learned(tokenizer, template_named("llama2"), input_of(tokenizer, chats["turns"])),
            (Texts{" b </s>", " 世界 </s>"}));
  EXPECT_EQ(learned(tokenizer, template_named("mistral"), input_of(tokenizer, chats["turns"])),
            (Texts{"b</s>", "世界\n\n</s>"}));
  // The system message moves to the last user turn, so prefixes differ; the content is found all the same.
  const ChatJson moved = {{{"role", "system"}, {"content", "S"}},
                          {{"role", "user"}, {"content", "a"}},
                          {{"role", "assistant"}, {"content", "b"}},
                          {{"role", "user"}, {"content", "c"}},
                          {{"role", "assistant"}, {"content", "d"}}};
  EXPECT_EQ(learned(tokenizer, template_named("mistral"), input_of(tokenizer, moved)),
            (Texts{"b</s>", "d</s>"}));
}

TEST(ChatMask, HeadersWithoutAGenerationPromptAreNotLearned) {
  const ChatTemplate chat = ChatTemplate::compile(
      "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}", "bare");
  const ChatJson messages = {{{"role", "user"}, {"content", "b"}},
                             {{"role", "assistant"}, {"content", "b"}},
                             {{"role", "user"}, {"content", "c"}},
                             {{"role", "assistant"}, {"content", "<|im_end|> x"}}};
  EXPECT_EQ(learned(smollm(), chat, input_of(smollm(), messages)),
            (Texts{"b<|im_end|>", "<|im_end|> x<|im_end|>"}));
}

TEST(ChatMask, WhatCannotBeDerivedIsRefused) {
  const ChatJson messages = {{{"role", "user"}, {"content", "Q"}},
                             {{"role", "assistant"}, {"content", "Answer"}},
                             {{"role", "user"}, {"content", "R"}},
                             {{"role", "assistant"}, {"content", "Again"}}};
  const std::string prompt = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
  struct Case {
    std::string source, expected;
  };
  for (const Case& one : {
           Case{"{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content|upper }}<|im_end|>\n{% endfor "
                "%}" +
                    prompt,
                "messages[1]"},
           {"{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role != 'assistant' or loop.last %}{{ "
            "m.content }}"
            "{% endif %}<|im_end|>\n{% endfor %}" +
                prompt,
            "messages[1] (assistant)"},
           {"{% for m in messages %}{{ m.content|replace('n', 'm') }}{% endfor %}", "messages[1]"},
           {"nothing at all", "messages[1]"},
           {"{% for m in messages %}{{ messages|length }}{{ m.role }}: {{ m.content|reverse }}{% endfor %}",
            "messages[1]"},
       }) {
    const ChatTemplate chat = ChatTemplate::compile(one.source, "t");
    try {
      const Texts texts = learned(smollm(), chat, input_of(smollm(), messages));
      ADD_FAILURE() << one.source << " gave " << texts.size() << ": " << (texts.empty() ? "" : texts[0]);
    } catch (const BadData& error) {
      EXPECT_NE(std::string(error.what()).find("d:1: " + one.expected), std::string::npos) << error.what();
    }
  }
  // What the template itself refuses names the sample too.
  const ChatTemplate refuses = ChatTemplate::compile("{{ raise_exception('no') }}", "t");
  try {
    tokenize_chat(smollm(), refuses, input_of(smollm(), messages), {}, "file:7");
    ADD_FAILURE();
  } catch (const BadData& error) {
    EXPECT_EQ(std::string(error.what()), "file:7: t:1: no");
  }
}

TEST(ChatMask, NoAssistantTurnMeansNothingIsLearned) {
  const MaskedTokens tokens =
      tokenize_chat(smollm(), template_named("smollm2"),
                    input_of(smollm(), {{{"role", "user"}, {"content", "a"}}}), {}, "s");
  EXPECT_EQ(std::count(tokens.loss_mask.begin(), tokens.loss_mask.end(), 1), 0);
}

// pad = eos: the real EOS is learned.  A prompt of 3 and a response of 2 tokens has 2 terms, and EOS is a
// third.
TEST(ChatMask, PromptAndResponse) {
  const std::string prompt = "The cat sat", response = " on mats";
  const auto prompt_ids = smollm().encode(prompt).ids, response_ids = smollm().encode(response).ids;
  ASSERT_EQ(prompt_ids.size(), 3u);
  ASSERT_EQ(response_ids.size(), 2u);
  MaskedTokens tokens = tokenize_prompt_response(smollm(), prompt, response, {.append_eos = false});
  EXPECT_EQ(tokens.ids, smollm().encode(prompt + response).ids);
  EXPECT_EQ(tokens.loss_mask, (std::vector<uint8_t>{0, 0, 0, 1, 1}));
  tokens = tokenize_prompt_response(smollm(), prompt, response);
  EXPECT_EQ(tokens.loss_mask, (std::vector<uint8_t>{0, 0, 0, 1, 1, 1}));
  EXPECT_EQ(tokens.ids.back(), 2);
  EXPECT_EQ(smollm().special().pad, smollm().special().eos);
  // Already there: not twice.
  EXPECT_EQ(tokenize_prompt_response(smollm(), prompt, response + "<|im_end|>").ids, tokens.ids);
  // A token over the border is not learned.
  tokens = tokenize_prompt_response(smollm(), "The cat s", "at", {.append_eos = false});
  EXPECT_EQ(tokens.loss_mask, (std::vector<uint8_t>{0, 0, 0}));
}

TEST(ChatMask, Text) {
  MaskedTokens tokens = tokenize_text(smollm(), "The cat");
  EXPECT_EQ(tokens.loss_mask, std::vector<uint8_t>(tokens.ids.size(), 1));
  EXPECT_EQ(tokens.ids.back(), 2);
  EXPECT_EQ(tokenize_text(smollm(), "The cat", {.append_eos = false}).ids, smollm().encode("The cat").ids);
  const Tokenizer bare = Tokenizer::from_file(kData + "tokenizer/tokenizer.json");  // names no EOS
  EXPECT_THROW(tokenize_text(bare, "a"), BadConfig);
  EXPECT_EQ(tokenize_text(smollm(), "a\x13", {.append_eos = false}).dropped_bytes, 1);
}

}  // namespace
}  // namespace titanium

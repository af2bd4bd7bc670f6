// Records of text through the whole room: file, tokenizer, template, mask.
#include "titanium/data/encode.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <numeric>

#include "titanium/base/error.h"
#include "titanium/batch/weights.h"
#include "titanium/data/dataset.h"
#include "titanium/data/test_files.h"

namespace titanium {
namespace {

using nlohmann::json;

const std::string kFolder = TITANIUM_SOURCE_DIR "/tests/data/tokenizer";

class Encode : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    tokenizer_ = new Tokenizer(Tokenizer::from_folder(kFolder));
    template_ = new ChatTemplate(ChatTemplate::compile(tokenizer_->chat_templates().at("default")));
  }
  static void TearDownTestSuite() {
    delete template_;
    delete tokenizer_;
  }
  static Dataset load(const json& records, DataOptions options = {}) {
    std::string text;
    for (const json& record : records) text += record.dump() + "\n";
    const TestFolder folder("encode");
    options.files = {folder.write("a.jsonl", text)};
    return Dataset::load(options, tokenizer_, template_);
  }
  static std::vector<int32_t> ids(const std::string& text) {
    const auto encoding = tokenizer_->encode(text);
    return {encoding.ids.begin(), encoding.ids.end()};
  }
  static Tokenizer* tokenizer_;
  static ChatTemplate* template_;
};
Tokenizer* Encode::tokenizer_ = nullptr;
ChatTemplate* Encode::template_ = nullptr;

const json& conversations() {
  static const json all = json::parse(std::ifstream(kFolder + "/chat.json"))["conversations"];
  return all;
}

TEST_F(Encode, ToolsThatTheTemplateDoesNotShowAreRefused) {
  json record = {
      {"messages", {{{"role", "user"}, {"content", "a"}}, {{"role", "assistant"}, {"content", "b"}}}}};
  record["tools"] = json::array();
  EXPECT_EQ(load(json::array({record})).size(), 1);
  record["tools"] = {{{"name", "f"}}};
  try {
    load(json::array({record}));
    ADD_FAILURE();
  } catch (const BadRecord& e) {
    EXPECT_NE(std::string(e.what()).find("a.jsonl:1: field 'tools'"), std::string::npos) << e.what();
  }
}

// Ids and masks of the reference's chats, both policies.
TEST_F(Encode, ChatsEqualTheReference) {
  json records = json::array();
  for (const json& chat : conversations()) records.push_back({{"messages", chat["messages"]}});
  for (bool newline : {false, true}) {
    DataOptions options;
    options.mask.trailing_newline = newline;
    const Dataset data = load(records, options);
    ASSERT_EQ(data.size(), static_cast<int64_t>(records.size()));
    for (int64_t i = 0; i < data.size(); ++i) {
      const json& chat = conversations()[static_cast<size_t>(i)];
      const Sample sample = data.sample(i);
      EXPECT_EQ(json(sample.ids), chat["ids"]) << i;
      EXPECT_EQ(json(sample.loss_mask),
                chat[newline ? "assistant_mask_with_trailing_newline" : "assistant_mask"])
          << i;
    }
    EXPECT_EQ(data.summary().untrained, 1);  // the chat in which the assistant says nothing
  }
}

// Tokenizer and template serve several threads at once.
TEST_F(Encode, ThreadsDoNotMatter) {
  json records = json::array();
  for (int i = 0; i < 600; ++i) {
    json messages = conversations()[static_cast<size_t>(1 + i % 7)]["messages"];
    messages[0]["content"] = fmt::format("{} number {}", messages[0]["content"].get<std::string>(), i);
    records.push_back({{"messages", messages}});
  }
  DataOptions options;
  options.threads = 1;
  const Dataset one = load(records, options);
  options.threads = 4;
  const Dataset four = load(records, options);
  EXPECT_EQ(four.fingerprint(), one.fingerprint());
  EXPECT_EQ(four.summary().text(), one.summary().text());
}

// A prompt of messages and a response are the chat that they form; the response alone is trained.
TEST_F(Encode, AListOfMessagesAsPrompt) {
  const json& chat = conversations()[2];
  json prompt = chat["messages"];
  const std::string response = prompt.back()["content"];
  prompt.erase(prompt.size() - 1);
  const Dataset data = load({{{"prompt", prompt}, {"response", response}}});
  const Sample sample = data.sample(0);
  EXPECT_EQ(json(sample.ids), chat["ids"]);
  std::vector<uint8_t> want = chat["assistant_mask"];
  int turns = 0;  // the last run of ones is the last turn
  for (size_t i = want.size(); i-- > 0;) {
    if (want[i] && (i + 1 == want.size() || !chat["assistant_mask"][i + 1].get<int>())) ++turns;
    want[i] = want[i] && turns == 1;
  }
  ASSERT_EQ(turns, 2);
  EXPECT_EQ(sample.loss_mask, want);
}

TEST_F(Encode, PromptAndResponseAsText) {
  const Dataset data = load({{{"prompt", "The sky is"}, {"response", " blue today"}}});
  const Sample sample = data.sample(0);
  auto want = ids("The sky is blue today");
  want.push_back(static_cast<int32_t>(*tokenizer_->special().eos));
  EXPECT_EQ(sample.ids, want);
  EXPECT_EQ(sample.loss_mask, (std::vector<uint8_t>{0, 0, 0, 1, 1, 1}));
  // Three terms: log p(blue | The sky is), log p(today | ...), log p(eos | ...), at positions 2 to 4.
  EXPECT_EQ(weigh(sample, Averaging::kSeqMeanTokenSum, count({&sample, 1})),
            (std::vector<double>{0, 0, 1, 1, 1, 0}));

  DataOptions no_eos;
  no_eos.append_eos = false;
  EXPECT_EQ(load({{{"prompt", "The sky is"}, {"response", " blue today"}}}, no_eos).sample(0).loss_mask,
            (std::vector<uint8_t>{0, 0, 0, 1, 1}));
}

TEST_F(Encode, PlainTextIsTrainedWhole) {
  const Dataset data = load({{{"text", "one two three"}}, {{"text", ""}}});
  auto want = ids("one two three");
  want.push_back(static_cast<int32_t>(*tokenizer_->special().eos));
  EXPECT_EQ(data.sample(0).ids, want);
  EXPECT_EQ(data.sample(0).loss_mask, std::vector<uint8_t>(want.size(), 1));
  EXPECT_EQ(data.sample(1).size(), 1);  // EOS alone
  EXPECT_EQ(data.summary().untrained, 1);
  DataOptions no_eos;
  no_eos.append_eos = false;
  EXPECT_THROW(load({{{"text", ""}}}, no_eos), BadRecord);
}

TEST_F(Encode, AnIdBeyondTheModelsVocabularyIsRefused) {
  DataOptions options;
  options.vocab_size = 100;
  try {
    load({{{"text", "one two three"}}}, options);
    FAIL();
  } catch (const BadRecord& e) {
    EXPECT_EQ(e.reason(), Reject::kText);
    EXPECT_NE(std::string(e.what()).find("a.jsonl:1: the tokenizer gives id"), std::string::npos) << e.what();
  }
}

TEST_F(Encode, WhatTheTemplateRefusesNamesTheLineOnce) {
  const ChatTemplate strict = ChatTemplate::compile("{{ raise_exception('no such role') }}");
  const TestFolder folder("strict");
  DataOptions options;
  options.files = {folder.write("a.jsonl", "\n{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}]}\n")};
  try {
    Dataset::load(options, tokenizer_, &strict);
    FAIL();
  } catch (const BadRecord& e) {
    const std::string message = e.what();
    EXPECT_EQ(e.reason(), Reject::kText);
    EXPECT_EQ(message.find(options.files[0] + ":2"), 0u) << message;
    EXPECT_EQ(message.rfind(options.files[0]), 0u) << message;
    EXPECT_NE(message.find("no such role"), std::string::npos) << message;
  }
  options.on_bad = OnBad::kSkip;
  EXPECT_THROW(Dataset::load(options, tokenizer_, nullptr), BadConfig);
}

}  // namespace
}  // namespace titanium

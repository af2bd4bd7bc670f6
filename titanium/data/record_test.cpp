#include "titanium/data/record.h"

#include <gtest/gtest.h>

namespace titanium {
namespace {

Record parse(const std::string& line, RecordForm form = RecordForm::kAuto) {
  return parse_record(line, form, 100, "x.jsonl:7");
}

TEST(Record, TheFiveForms) {
  const Record chat = parse(R"({"id": 5, "messages": [{"role": "user", "content": "a"},
      {"role": "assistant", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]}]})");
  EXPECT_EQ(chat.form, RecordForm::kMessages);
  EXPECT_EQ(chat.messages.size(), 2u);
  EXPECT_EQ(chat.messages[1]["content"], "bc");
  EXPECT_TRUE(chat.tools.is_null());

  const Record pair = parse(R"({"prompt": "p", "response": "r", "text": null})");
  EXPECT_EQ(pair.form, RecordForm::kPromptResponse);
  EXPECT_EQ(pair.prompt, "p");
  EXPECT_EQ(pair.response, "r");
  EXPECT_TRUE(pair.messages.empty());

  const Record turn = parse(R"({"prompt": [{"role": "user", "content": "p"}], "response": "r"})");
  EXPECT_EQ(turn.form, RecordForm::kPromptResponse);
  EXPECT_EQ(turn.messages,
            ChatJson::parse(R"([{"role":"user","content":"p"},{"role":"assistant","content":"r"}])"));

  EXPECT_EQ(parse(R"({"text": "t\u00e9"})").text, "t\xC3\xA9");

  const Record ids = parse(R"({"input_ids": [0, 99, 5], "loss_mask": [0, 1, 1]})");
  EXPECT_EQ(ids.form, RecordForm::kInputIds);
  EXPECT_EQ(ids.ids, (std::vector<int32_t>{0, 99, 5}));
  EXPECT_EQ(ids.loss_mask, (std::vector<uint8_t>{0, 1, 1}));
  EXPECT_EQ(parse(R"({"input_ids": [3, 4]})").loss_mask, (std::vector<uint8_t>{1, 1}));
  EXPECT_EQ(parse(R"({"input_ids": [3, -0]})").ids,
            (std::vector<int32_t>{3, 0}));  // an integer, as in Python
}

TEST(Record, ToolsKeepTheOrderOfTheirKeys) {
  const Record chat = parse(R"({"tools": [{"z": 1, "a": {"y": 2, "b": 3}}],
      "messages": [{"role": "assistant", "content": null, "tool_calls": [{"name": "z", "args": {}}]}]})");
  EXPECT_EQ(chat.tools.dump(), R"([{"z":1,"a":{"y":2,"b":3}}])");
  EXPECT_TRUE(chat.messages[0]["content"].is_null());
}

TEST(Record, AFixedFormIgnoresTheFieldsOfOthers) {
  const std::string both = R"({"text": "t", "prompt": "p", "response": "r"})";
  EXPECT_EQ(parse(both, RecordForm::kText).text, "t");
  EXPECT_EQ(parse(both, RecordForm::kPromptResponse).prompt, "p");
  EXPECT_THROW(parse(both, RecordForm::kMessages), BadRecord);
}

struct Bad {
  const char* line;
  Reject reason;
  const char* message;  // part of it
};

TEST(Record, EveryComplaintNamesTheLineAndTheField) {
  const Bad cases[] = {
      {"{", Reject::kJson, "not valid JSON"},
      {"[1]", Reject::kJson, "array"},
      {"{\"text\": \"\xFF\"}", Reject::kJson, "not valid JSON"},
      {"{\"text\": \"a\", \"text\": \"b\"}", Reject::kJson, "text"},
      {R"({"text": "a"} x)", Reject::kJson, "not valid JSON"},
      {R"({"a": 1e999})", Reject::kJson, ""},
      {R"({"id": 1})", Reject::kField, "none of the fields"},
      {R"({"text": null})", Reject::kField, "none of the fields"},
      {R"({"text": "a", "prompt": "b", "response": "c"})", Reject::kField, "'prompt', 'response', 'text'"},
      {R"({"messages": [], "input_ids": []})", Reject::kField, "'messages', 'input_ids'"},
      {R"({"text": 5})", Reject::kField, "'text'"},
      {R"({"prompt": "a"})", Reject::kField, "'response' is missing"},
      {R"({"response": "a"})", Reject::kField, "'prompt' is missing"},
      {R"({"prompt": {}, "response": "a"})", Reject::kField, "'prompt'"},
      {R"({"prompt": [], "response": "a"})", Reject::kField, "'prompt'"},
      {R"({"messages": "a"})", Reject::kField, "'messages'"},
      {R"({"messages": []})", Reject::kField, "'messages'"},
      {R"({"messages": [5]})", Reject::kField, "'messages[0]'"},
      {R"({"messages": [{"content": "a"}]})", Reject::kField, "'messages[0].role'"},
      {R"({"messages": [{"role": 1, "content": "a"}]})", Reject::kField, "'messages[0].role'"},
      {R"({"messages": [{"role": "user"}]})", Reject::kField, "'messages[0].content'"},
      {R"({"messages": [{"role": "user", "content": 5}]})", Reject::kField, "'messages[0].content'"},
      {R"({"messages": [{"role": "user", "content": ["a"]}]})", Reject::kField, "'messages[0].content[0]'"},
      {R"({"messages": [{"role": "user", "content": [{"type": "image", "url": "a"}]}]})", Reject::kField,
       "'messages[0].content[0].type'"},
      {R"({"messages": [{"role": "user", "content": [{"type": "text"}]}]})", Reject::kField,
       "'messages[0].content[0].text'"},
      {R"({"messages": [{"role": "user", "content": "a"}], "tools": {}})", Reject::kField, "'tools'"},
      {R"({"messages": [{"role": "assistant", "content": "a", "tool_calls": [{"x": 1}]}]})", Reject::kField,
       "'messages[0].tool_calls[0]' names no function"},
      {R"({"messages": [{"role": "assistant", "content": "a", "tool_calls": {}}]})", Reject::kField,
       "'messages[0].tool_calls' is object, not a list"},
      {R"({"input_ids": 5})", Reject::kField, "'input_ids'"},
      {R"({"input_ids": [1, 100]})", Reject::kField, "'input_ids[1]' is 100, not an id in [0, 100)"},
      {R"({"input_ids": [-1]})", Reject::kField, "'input_ids[0]' is -1"},
      {R"({"input_ids": [1.0]})", Reject::kField, "'input_ids[0]' is 1.0"},
      {R"({"input_ids": [18446744073709551615]})", Reject::kField, "'input_ids[0]'"},
      {R"({"input_ids": [[1]]})", Reject::kField, "'input_ids[0]' is a JSON array"},
      {R"({"input_ids": [1, 2], "loss_mask": [1]})", Reject::kField, "'loss_mask' has 1 entries"},
      {R"({"input_ids": [1], "loss_mask": [2]})", Reject::kField, "'loss_mask[0]' is 2"},
      {R"({"input_ids": [1], "loss_mask": 1})", Reject::kField, "'loss_mask'"},
      {R"({"input_ids": [1, 2], "labels": [-100, 2]})", Reject::kField, "'labels' is not read here"},
      {R"({"input_ids": [1, 2], "attention_mask": [1, 0]})", Reject::kField, "'attention_mask'"},
      {R"({"loss_mask": [1]})", Reject::kField, "'input_ids' is missing"},
  };
  for (const Bad& c : cases) {
    try {
      parse(c.line);
      ADD_FAILURE() << c.line;
    } catch (const BadRecord& e) {
      EXPECT_EQ(e.kind(), ErrorKind::kBadData);
      EXPECT_EQ(e.reason(), c.reason) << c.line;
      EXPECT_EQ(std::string(e.what()).rfind("x.jsonl:7: ", 0), 0u) << e.what();
      EXPECT_NE(std::string(e.what()).find(c.message), std::string::npos) << e.what();
    }
  }
}

TEST(Record, AnAttentionMaskOfOnesSaysNothing) {
  EXPECT_EQ(parse(R"({"input_ids": [1, 2], "attention_mask": [1, 1], "id": 5})").ids.size(), 2u);
}

TEST(Record, DeepNestingIsRefusedNotFollowed) {
  const std::string deep = std::string(200000, '[');
  EXPECT_THROW(parse(deep), BadRecord);
  EXPECT_THROW(parse("{\"text\": " + deep), BadRecord);
  EXPECT_THROW(parse("{\"a\": " + deep + std::string(200000, ']') + "}"), BadRecord);
}

TEST(Record, FormsHaveNames) {
  for (RecordForm form : {RecordForm::kAuto, RecordForm::kMessages, RecordForm::kPromptResponse,
                          RecordForm::kText, RecordForm::kInputIds}) {
    EXPECT_EQ(record_form_from(name(form)), form);
  }
  EXPECT_THROW(record_form_from("jsonl"), BadConfig);
}

}  // namespace
}  // namespace titanium

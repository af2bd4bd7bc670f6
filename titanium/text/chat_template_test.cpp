#include "titanium/text/chat_template.h"

#include <gtest/gtest.h>

#include <ctime>

#include "titanium/base/error.h"
#include "titanium/base/random.h"
#include "titanium/formats/json.h"

namespace titanium {
namespace {

const std::string kData = std::string(TITANIUM_SOURCE_DIR) + "/tests/data/";

ChatJson read_ordered(const std::string& path) {
  return ChatJson::parse(read_file(path));
}

std::string render(const std::string& source, const ChatJson& variables = ChatJson::object()) {
  ChatInput input;
  input.variables = variables;
  return ChatTemplate::compile(source, "t").render(input).text;
}

template <typename E>
std::string error_of(const std::string& source, const ChatJson& variables = ChatJson::object()) {
  try {
    render(source, variables);
  } catch (const E& error) {
    return error.what();
  }
  return "none";
}

TEST(ChatTemplate, SmolLm2Conversations) {
  const ChatTemplate chat = ChatTemplate::compile(read_file(kData + "tokenizer/chat_template.jinja"));
  EXPECT_FALSE(chat.marks_generation());
  const ChatJson cases = read_ordered(kData + "tokenizer/chat.json")["conversations"];
  ASSERT_EQ(cases.size(), 8u);
  for (const ChatJson& one : cases) {
    ChatInput input;
    input.messages = one["messages"];
    EXPECT_EQ(chat.render(input).text, one["text"].get<std::string>());
    input.add_generation_prompt = true;
    EXPECT_EQ(chat.render(input).text, one["text_with_generation_prompt"].get<std::string>());
  }
}

TEST(ChatTemplate, FamiliesRenderAsTransformersDoes) {
  const ChatJson all = read_ordered(kData + "text/renders.json");
  ASSERT_GE(all["cases"].size(), 400u);
  for (const ChatJson& one : all["cases"]) {
    const std::string name = one["template"];
    const ChatTemplate chat = ChatTemplate::compile(read_file(kData + "text/" + name), name);
    ChatInput input;
    input.messages = all["chats"][one["chat"].get<std::string>()];
    input.bos_token = "<s>";
    input.eos_token = "</s>";
    for (const auto& [key, value] : one["options"].items()) {
      if (key == "tools")
        input.tools = value;
      else if (key == "add_generation_prompt")
        input.add_generation_prompt = value;
      else
        input.variables[key] = value;
    }
    const std::string where = name + " " + one["chat"].get<std::string>() + " " + one["options"].dump();
    if (one.contains("error")) {
      try {
        chat.render(input);
        ADD_FAILURE() << where << " is to fail: " << one["error"];
      } catch (const BadData& error) {
        EXPECT_NE(std::string(error.what()).find(name + ":"), std::string::npos) << error.what();
      }
      continue;
    }
    const RenderedChat rendered = chat.render(input);
    EXPECT_EQ(rendered.text, one["text"].get<std::string>()) << where;
    ASSERT_EQ(rendered.generation.size(), one["generation"].size()) << where;
    for (size_t i = 0; i < rendered.generation.size(); ++i)
      EXPECT_EQ(rendered.generation[i],
                (ByteSpan{one["generation"][i][0].get<int64_t>(), one["generation"][i][1].get<int64_t>()}));
    EXPECT_EQ(chat.marks_generation(), name == "generation.jinja");
  }
}

TEST(ChatTemplate, ConstructsRenderAsJinjaDoes) {
  const ChatJson all = read_ordered(kData + "text/renders.json");
  ASSERT_GE(all["constructs"].size(), 35u);
  for (const ChatJson& one : all["constructs"]) {
    const std::string source = one["source"];
    ChatInput input;
    input.messages = all["chats"]["turns"];
    try {
      EXPECT_EQ(ChatTemplate::compile(source).render(input).text, one["text"].get<std::string>()) << source;
    } catch (const Error& error) {
      ADD_FAILURE() << source << ": " << error.what();
    }
  }
}

// As transformers 5: null keys go, and reasoning has three names.
TEST(ChatTemplate, MessagesAreNormalized) {
  ChatInput input;
  input.messages = {{{"role", "a"}, {"content", nullptr}, {"thinking", "why"}}};
  EXPECT_EQ(ChatTemplate::compile("{{ messages[0].content is defined }} {{ messages[0].reasoning_content }}"
                                  "{{ messages[0].keys()|list }}")
                .render(input)
                .text,
            "False why['thinking', 'role', 'reasoning_content']");
}

TEST(ChatTemplate, StrftimeNowTakesTheGivenTime) {
  ChatInput input;
  input.now = 1721995200;  // 26 July 2024, 12:00 UTC
  std::tm parts{};
  const std::time_t now = 1721995200;
  localtime_r(&now, &parts);
  char expected[64];
  std::strftime(expected, sizeof expected, "%d %b %Y", &parts);
  EXPECT_EQ(ChatTemplate::compile("{{ strftime_now('%d %b %Y') }}").render(input).text, expected);
}

TEST(ChatTemplate, MissingTokensAreUndefined) {
  EXPECT_EQ(render("{{ bos_token is defined }}{{ tools is none }}{{ documents is none }}"), "FalseTrueTrue");
}

TEST(ChatTemplate, WhatIsNotSupportedIsNamedWithItsLine) {
  struct Case {
    const char *source, *expected;
  };
  for (const Case& one :
       {Case{"a\n\n{% include 'x' %}", "t:3: the block 'include'"},
        {"{% block x %}", "t:1: the block 'block'"},
        {"\n{{ a|nope }}", "t:2: the filter 'nope'"},
        {"{{ a is nope }}", "t:1: the test 'nope'"},
        {"{{ 'a'.format(1) }}", "t:1: the method 'format'"},
        {"{{ nope() }}", "t:1: the function 'nope'"},
        {"{% for x in y recursive %}", "recursive"},
        {"{% if x %}", "{% endif %} is expected"},
        {"{% endif %}", "the block 'endif'"},
        {"{{ 'abc }}", "not closed"},
        {"{{ a", "not closed"},
        {"{# a", "not closed"},
        {"{% raw %} a", "not closed"},
        {"{{ (a }}", "t:1: unexpected '}'"},
        {"{{ a b }}", "'b'"},
        {"{{ }}", "an expression is expected"},
        {"{{ a.b.(c) }}", "a name is expected"},
        {"{{ 99999999999999999999 }}", "too large"},
        {"{% set x.y = 1 %}", "not a namespace"},
        {"{% set loop = 1 %}", "cannot be assigned"},
        {"{% break %}", "outside of a loop"},
        {"{{ f(*a) }}", "unpacked arguments"},
        {"{% macro m() %}{% generation %}{% endgeneration %}{% endmacro %}", "generation"},
        {"{% for x in y %}{% macro m() %}{% endmacro %}{% endfor %}", "a macro inside a loop"},
        {"{{ '%s' % 3 }}", "formatting with %"},
        {"{{ 'a'|trim('a', 'b') }}", "too many arguments"},
        {"{{ [1]|sort(up=1) }}", "named arguments"},
        {"{{ {1: 2} }}", "the key of a mapping"},
        {"{{ \xff }}", "not UTF-8"}}) {
    const std::string message = error_of<BadConfig>(one.source);
    EXPECT_NE(message.find(one.expected), std::string::npos) << one.source << ": " << message;
    EXPECT_EQ(message.substr(0, 2), "t:") << message;
  }
}

TEST(ChatTemplate, DataThatDoesNotFitIsRefused) {
  struct Case {
    const char *source, *expected;
  };
  for (const Case& one : {Case{"\n{{ raise_exception('no ' ~ 1) }}", "t:2: no 1"},
                          {"{{ x.y }}", "'x' is undefined, so it has no attribute 'y'"},
                          {"{{ x['y'] }}", "'x' is undefined"},
                          {"{{ 1 + 'a' }}", "int + str"},
                          {"{{ 'a' + none }}", "str + None"},
                          {"{{ 1 // 0 }}", "division by zero"},
                          {"{{ 1 < 'a' }}", "cannot be ordered"},
                          {"{% for a in none %}{% endfor %}", "cannot be iterated"},
                          {"{% for a, b in [[1]] %}{% endfor %}", "1 values are unpacked into 2"},
                          {"{{ range|tojson }}", "no JSON form"},
                          {"{{ none|length }}", "no length"},
                          {"{{ 9223372036854775807 + 1 }}", "does not fit"},
                          {"{{ [1].index(2) }}", "has no 2"}}) {
    const std::string message = error_of<BadData>(one.source);
    EXPECT_NE(message.find(one.expected), std::string::npos) << one.source << ": " << message;
  }
  ChatInput input;
  input.messages = 3;
  EXPECT_THROW(ChatTemplate::compile("").render(input), BadData);
  input.messages = {3};
  EXPECT_THROW(ChatTemplate::compile("").render(input), BadData);
}

TEST(ChatTemplate, LimitsHold) {
  const std::string deep_value =
      "{% set n = namespace(x=[]) %}{% for i in range(1000) %}{% set n.x = [n.x] %}{% endfor %}";
  EXPECT_NE(error_of<BadData>(deep_value).find("nested deeper"), std::string::npos);
  const std::string wide_value =
      "{% set n = namespace(x=['lol']) %}{% for i in range(100) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ "
      "n.x }}";
  EXPECT_NE(error_of<BadData>(wide_value).find("t:1: a value is larger than"), std::string::npos);
  const std::string doubling =
      "{% set n = namespace(x='a') %}{% for i in range(100) %}{% set n.x = n.x ~ n.x %}{% endfor %}";
  EXPECT_NE(error_of<BadConfig>(doubling).find("bytes of values"), std::string::npos);
  EXPECT_NE(error_of<BadConfig>("{{ 'abc' * 100000000000 }}").find("large"), std::string::npos);
  EXPECT_NE(error_of<BadConfig>("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}").find("recurses"),
            std::string::npos);
  const std::string long_loop =
      "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}";
  EXPECT_NE(error_of<BadConfig>(long_loop).find("t:1: the template"), std::string::npos);
  const std::string output = "{% set a = 'x' * 1000000 %}{% for b in range(1000) %}{{ a }}{% endfor %}";
  EXPECT_NE(error_of<BadConfig>(output).find("the output is longer"), std::string::npos);
  EXPECT_NE(error_of<BadConfig>("{{ " + std::string(5000, '(') + "1" + std::string(5000, ')') + " }}")
                .find("nested deeper"),
            std::string::npos);
  EXPECT_NE(error_of<BadConfig>("{{ " + std::string(5000, '-') + "1 }}").find("nested deeper"),
            std::string::npos);
  std::string chain = "{{ a";
  for (int i = 0; i < 5000; ++i) chain += ".b";
  EXPECT_NE(error_of<BadConfig>(chain + " }}").find("nested deeper"), std::string::npos);
  std::string nots = "{{ ", ifs;
  for (int i = 0; i < 5000; ++i) nots += "not ", ifs += "{% if a %}";
  EXPECT_NE(error_of<BadConfig>(nots + "a }}").find("nested deeper"), std::string::npos);
  EXPECT_NE(error_of<BadConfig>(ifs).find("nested deeper"), std::string::npos);
  // A chain of namespaces is freed without recursion.
  EXPECT_EQ(render("{% set n = namespace(x=none) %}{% for i in range(100000) %}{% set n.x = namespace(x=n.x) "
                   "%}{% endfor %}ok"),
            "ok");
  EXPECT_EQ(render("{% set n = namespace() %}{% set n.me = [n] %}ok"), "ok");
  ChatJson nested = ChatJson::array();
  for (int i = 0; i < 1000; ++i) nested = ChatJson::array({nested});
  EXPECT_NE(error_of<BadData>("", {{"x", nested}}).find("nested deeper"), std::string::npos);
}

// Damaged templates give an error or a text, nothing else.
TEST(ChatTemplate, AnyBytesAreSafe) {
  const Random random(3, Purpose::kTest);
  const ChatJson all = read_ordered(kData + "text/renders.json");
  uint64_t draw = 0;
  for (const char* name : {"llama3.1.jinja", "qwen3.jinja", "mistral.jinja"}) {
    const std::string whole = read_file(kData + "text/" + name);
    for (int round = 0; round < 300; ++round) {
      std::string source = whole;
      for (int i = 0; i < 3; ++i) {
        const size_t at = random.below(draw++, source.size());
        const size_t size = random.below(draw++, 12);
        if (random.below(draw++, 2))
          source.erase(at, size);
        else
          source.insert(at, whole, random.below(draw++, whole.size()), size);
      }
      ChatInput input;
      input.messages = all["chats"]["tool"];
      try {
        ChatTemplate::compile(source).render(input);
      } catch (const BadConfig&) {
      } catch (const BadData&) {
      }
    }
  }
}

}  // namespace
}  // namespace titanium

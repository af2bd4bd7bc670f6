#include "titanium/text/tokenizer.h"

#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <thread>

#include "titanium/base/error.h"
#include "titanium/base/random.h"
#include "titanium/formats/json.h"
#include "titanium/text/unicode.h"

namespace titanium {
namespace {

const std::string kData = std::string(TITANIUM_SOURCE_DIR) + "/tests/data/";

const std::string& smollm_json() {
  static const std::string bytes = read_file(kData + "tokenizer/tokenizer.json");
  return bytes;
}
const Json& smollm_parsed() {
  static const Json parsed = parse_json(smollm_json(), "tokenizer.json");
  return parsed;
}
const Tokenizer& smollm() {
  static const Tokenizer tokenizer = Tokenizer::from_file(kData + "tokenizer/tokenizer.json");
  return tokenizer;
}

// A byte-level tokenizer over all bytes and a few merges, to change in tests.
Json small_json() {
  Json json = {{"version", "1.0"},
               {"truncation", nullptr},
               {"padding", nullptr},
               {"added_tokens", Json::array()},
               {"normalizer", nullptr},
               {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", true}}},
               {"post_processor", nullptr},
               {"decoder", {{"type", "ByteLevel"}}},
               {"model", {{"type", "BPE"}, {"vocab", Json::object()}, {"merges", Json::array()}}}};
  Json& vocab = json["model"]["vocab"];
  const Tokenizer& full = smollm();
  int next = 0;
  for (const auto& [text, id] : smollm_parsed()["model"]["vocab"].items())
    if (full.token_bytes(id.get<int64_t>()).size() == 1) vocab[text] = next++;
  for (const char* merge : {"a b", "b c", "ab c", "Ġ a", "h e", "l l", "he ll", "hell o"}) {
    const std::string text = merge;
    const size_t space = text.find(' ');
    vocab[text.substr(0, space) + text.substr(space + 1)] = next++;
    json["model"]["merges"].push_back(merge);
  }
  return json;
}

Json added(int64_t id, const std::string& content) {
  return {{"id", id},        {"content", content},  {"single_word", false}, {"lstrip", false},
          {"rstrip", false}, {"normalized", false}, {"special", true}};
}

std::string error_of(const Json& json) {
  try {
    Tokenizer::from_json(json.dump(), "t.json");
  } catch (const BadConfig& error) {
    return error.what();
  }
  return "none";
}

// The spans of an encoding cover the text in order, and each token's bytes are those of its span.
void expect_spans_match(const Tokenizer& tokenizer, const std::string& text, const Encoding& encoding) {
  int64_t at = 0;
  for (size_t i = 0; i < encoding.ids.size(); ++i) {
    const ByteSpan span = encoding.spans[i];
    ASSERT_EQ(span.begin, at) << text << " token " << i;
    at = span.end;
    EXPECT_EQ(tokenizer.token_bytes(encoding.ids[i]),
              text.substr(static_cast<size_t>(span.begin), static_cast<size_t>(span.end - span.begin)));
  }
  EXPECT_EQ(at, static_cast<int64_t>(text.size()));
}

TEST(Tokenizer, Strings) {
  const Json cases = read_json(kData + "tokenizer/strings.json");
  ASSERT_GE(cases.size(), 40u);
  for (const Json& one : cases) {
    const std::string text = one["text"];
    const Encoding encoding = smollm().encode(text);
    EXPECT_EQ(encoding.ids, one["ids"].get<std::vector<int64_t>>()) << text;
    EXPECT_EQ(smollm().encode(text, true).ids, encoding.ids);
    EXPECT_EQ(smollm().decode(encoding.ids), one["decoded"].get<std::string>());
    EXPECT_EQ(smollm().decode(encoding.ids, true), one["decoded_skip_special"].get<std::string>());
    expect_spans_match(smollm(), text, encoding);
  }
}

TEST(Tokenizer, PreTokenizerVariants) {
  const Json variants = read_json(kData + "tokenizer/pretokenizer_variants.json");
  ASSERT_EQ(variants.size(), 3u);
  for (const Json& variant : variants) {
    Json json = smollm_parsed();
    json["pre_tokenizer"] = variant["patch"]["pre_tokenizer"];
    json["normalizer"] = variant["patch"]["normalizer"];
    json["model"]["ignore_merges"] = variant["patch"]["ignore_merges"];
    const Tokenizer tokenizer = Tokenizer::from_json(json.dump());
    for (const Json& one : variant["strings"]) {
      const std::string text = one["text"];
      const Encoding encoding = tokenizer.encode(text);
      EXPECT_EQ(encoding.ids, one["ids"].get<std::vector<int64_t>>()) << variant["name"] << " " << text;
      EXPECT_EQ(tokenizer.decode(encoding.ids), one["decoded"].get<std::string>());
    }
  }
}

TEST(Tokenizer, PrefixDecode) {
  for (const Json& one : read_json(kData + "tokenizer/prefix_decode.json")) {
    const auto ids = one["ids"].get<std::vector<int64_t>>();
    for (size_t n = 0; n <= ids.size(); ++n)
      EXPECT_EQ(smollm().decode({ids.begin(), ids.begin() + static_cast<int64_t>(n)}),
                one["prefix_decoded"][n].get<std::string>());
    StreamDecoder stream(smollm());
    std::string so_far;
    for (size_t n = 0; n < ids.size(); ++n) {
      so_far += stream.push(ids[n]);
      const std::string whole = one["prefix_decoded"][n + 1];
      EXPECT_EQ(whole.substr(0, so_far.size()), so_far);
      EXPECT_EQ(so_far.find("\xef\xbf\xbd"), std::string::npos);
    }
    EXPECT_EQ(so_far + stream.finish(), one["text"].get<std::string>());
  }
}

// Any ids, valid text or not: the stream and decode() give the same.
TEST(Tokenizer, StreamEqualsDecode) {
  const Random random(1, Purpose::kTest);
  for (uint64_t round = 0; round < 200; ++round) {
    std::vector<int64_t> ids;
    for (uint64_t i = 0; i < 30; ++i)
      ids.push_back(static_cast<int64_t>(random.below(round * 64 + i, i % 2 ? 400 : 49152)));
    for (const bool skip : {false, true}) {
      StreamDecoder stream(smollm(), skip);
      std::string out;
      for (const int64_t id : ids) out += stream.push(id);
      EXPECT_EQ(out + stream.finish(), smollm().decode(ids, skip));
    }
  }
}

TEST(Tokenizer, InvalidBytesAreRepairedAsRustDoes) {
  // Cases of the Unicode Standard, section 3.9, tables 3-8 to 3-11.
  std::string out;
  unicode::append_repaired(out, "\xc0\xaf\xe0\x80\xbf\xf0\x81\x82\x41");
  EXPECT_EQ(out,
            "\ufffd\ufffd\ufffd\ufffd\ufffd\ufffd\ufffd\ufffd"
            "A");
  out.clear();
  unicode::append_repaired(out, "\xed\xa0\x80\xed\xbf\xbf\xed\xaf\x41");
  EXPECT_EQ(out,
            "\ufffd\ufffd\ufffd\ufffd\ufffd\ufffd\ufffd\ufffd"
            "A");
  out.clear();
  unicode::append_repaired(out, "\xf4\x91\x92\x93\xff\x41\x80\xbf\x42");
  EXPECT_EQ(out,
            "\ufffd\ufffd\ufffd\ufffd\ufffd"
            "A\ufffd\ufffd"
            "B");
  out.clear();
  unicode::append_repaired(out, "\xe1\x80\xe2\xf0\x91\x92\xf1\xbf\x41");
  EXPECT_EQ(out,
            "\ufffd\ufffd\ufffd\ufffd"
            "A");
}

TEST(Tokenizer, UnknownIdsAreRefused) {
  EXPECT_THROW(smollm().decode({49152}), BadData);
  EXPECT_THROW(smollm().decode({-1}), BadData);
  EXPECT_EQ(smollm().vocab_size(), 49152);
  EXPECT_TRUE(smollm().is_special(2));
  EXPECT_FALSE(smollm().is_special(100));
  EXPECT_EQ(smollm().id("<|im_end|>"), 2);
  EXPECT_EQ(smollm().id("no such token"), std::nullopt);
}

TEST(Tokenizer, TextMustBeUtf8) {
  try {
    smollm().encode("ab\xff");
    FAIL();
  } catch (const BadData& error) {
    EXPECT_NE(std::string(error.what()).find("byte 2"), std::string::npos) << error.what();
  }
}

// SmolLM2 has no token for the byte 0x13.  Hugging Face drops it; here it is counted too.
TEST(Tokenizer, BytesWithoutTokenAreCounted) {
  const Encoding encoding = smollm().encode(
      "a\x13"
      "b");
  EXPECT_EQ(encoding.ids, (std::vector<int64_t>{81, 82}));
  EXPECT_EQ(encoding.spans, (std::vector<ByteSpan>{{0, 1}, {2, 3}}));
  EXPECT_EQ(encoding.dropped_bytes, 1);
}

TEST(Tokenizer, UnknownToken) {
  Json json = small_json();
  json["model"]["unk_token"] = "a";
  const int64_t unknown = json["model"]["vocab"]["a"];
  Tokenizer tokenizer = Tokenizer::from_json(json.dump());
  EXPECT_EQ(tokenizer.encode("\x13\x14").ids, (std::vector<int64_t>{unknown, unknown}));
  json["model"]["fuse_unk"] = true;
  tokenizer = Tokenizer::from_json(json.dump());
  const Encoding encoding = tokenizer.encode("\x13\x14");
  EXPECT_EQ(encoding.ids, (std::vector<int64_t>{unknown}));
  EXPECT_EQ(encoding.spans, (std::vector<ByteSpan>{{0, 2}}));
  EXPECT_EQ(encoding.dropped_bytes, 0);
}

TEST(Tokenizer, MergesAreStringsOrPairs) {
  Json json = small_json();
  const auto ids = Tokenizer::from_json(json.dump()).encode("abc hello").ids;
  for (Json& merge : json["model"]["merges"]) {
    const std::string text = merge;
    const size_t space = text.find(' ');
    merge = {text.substr(0, space), text.substr(space + 1)};
  }
  EXPECT_EQ(Tokenizer::from_json(json.dump()).encode("abc hello").ids, ids);
  EXPECT_EQ(ids[0], json["model"]["vocab"]["abc"].get<int64_t>());
}

TEST(Tokenizer, AddPrefixSpace) {
  Json json = small_json();
  json["pre_tokenizer"]["add_prefix_space"] = true;
  const Tokenizer tokenizer = Tokenizer::from_json(json.dump());
  const int64_t space_a = json["model"]["vocab"]["Ġa"], c = json["model"]["vocab"]["c"];
  Encoding encoding = tokenizer.encode("ac");
  EXPECT_EQ(encoding.ids, (std::vector<int64_t>{space_a, c}));
  EXPECT_EQ(encoding.spans, (std::vector<ByteSpan>{{0, 1}, {1, 2}}));
  encoding = tokenizer.encode(" ac");
  EXPECT_EQ(encoding.ids, (std::vector<int64_t>{space_a, c}));
  EXPECT_EQ(encoding.spans, (std::vector<ByteSpan>{{0, 2}, {2, 3}}));
  encoding = tokenizer.encode("c");  // the added space is a token alone: it stands for no byte
  EXPECT_EQ(encoding.ids, (std::vector<int64_t>{json["model"]["vocab"]["Ġ"], c}));
  EXPECT_EQ(encoding.spans, (std::vector<ByteSpan>{{0, 0}, {0, 1}}));
}

TEST(Tokenizer, AddedTokenRules) {
  Json json = small_json();
  const int64_t base = static_cast<int64_t>(json["model"]["vocab"].size());
  const char* contents[] = {"<s>", "<s>>", "<left>", "<right>", "word"};
  for (int64_t i = 0; i < 5; ++i) json["added_tokens"].push_back(added(base + i, contents[i]));
  json["added_tokens"][2]["lstrip"] = true;
  json["added_tokens"][3]["rstrip"] = true;
  json["added_tokens"][4]["single_word"] = true;
  json["added_tokens"][4]["special"] = false;
  const Tokenizer tokenizer = Tokenizer::from_json(json.dump());
  const int64_t a = json["model"]["vocab"]["a"], space = json["model"]["vocab"]["Ġ"];
  EXPECT_EQ(tokenizer.encode("<s>><s>").ids, (std::vector<int64_t>{base + 1, base}));  // longest first
  Encoding encoding = tokenizer.encode("a \n<left>a<right>\t a");
  EXPECT_EQ(encoding.ids, (std::vector<int64_t>{a, base + 2, a, base + 3, a}));
  EXPECT_EQ(encoding.spans, (std::vector<ByteSpan>{{0, 1}, {1, 9}, {9, 10}, {10, 19}, {19, 20}}));
  encoding = tokenizer.encode("<right>  <left>");  // the first takes the spaces
  EXPECT_EQ(encoding.spans, (std::vector<ByteSpan>{{0, 9}, {9, 15}}));
  EXPECT_EQ(tokenizer.encode("word").ids, (std::vector<int64_t>{base + 4}));
  EXPECT_EQ(tokenizer.encode("a word").ids, (std::vector<int64_t>{a, space, base + 4}));
  EXPECT_GT(tokenizer.encode("aword").ids.size(), 2u);
  EXPECT_GT(tokenizer.encode("word\u00e9").ids.size(), 2u);
  EXPECT_EQ(tokenizer.decode({base, a, base + 4}, true), "aword");
}

TEST(Tokenizer, NormalizedTextKeepsItsOffsets) {
  Json json = smollm_parsed();
  json["normalizer"] = {{"type", "Sequence"}, {"normalizers", {{{"type", "NFC"}}}}};
  const Tokenizer tokenizer = Tokenizer::from_json(json.dump());
  const std::string decomposed = "cafe\u0301 x\u212b", composed = "caf\u00e9 x\u00c5";
  const Encoding encoding = tokenizer.encode(decomposed);
  EXPECT_EQ(encoding.ids, smollm().encode(composed).ids);
  EXPECT_EQ(tokenizer.decode(encoding.ids), composed);
  EXPECT_EQ(encoding.spans.front().begin, 0);
  EXPECT_EQ(encoding.spans.back().end, static_cast<int64_t>(decomposed.size()));
  for (const ByteSpan span : encoding.spans) {
    EXPECT_TRUE(unicode::starts_char(decomposed[static_cast<size_t>(span.begin)]));
    EXPECT_LT(span.begin, span.end);
  }
}

TEST(Tokenizer, TemplateProcessingAddsBos) {
  Json json = small_json();
  const int64_t base = static_cast<int64_t>(json["model"]["vocab"].size());
  json["added_tokens"].push_back(added(base, "<bos>"));
  json["added_tokens"].push_back(added(base + 1, "<eos>"));
  json["post_processor"] = {
      {"type", "Sequence"},
      {"processors",
       {{{"type", "ByteLevel"}, {"trim_offsets", false}},
        {{"type", "TemplateProcessing"},
         {"single",
          {{{"SpecialToken", {{"id", "<bos>"}, {"type_id", 0}}}},
           {{"Sequence", {{"id", "A"}, {"type_id", 0}}}},
           {{"SpecialToken", {{"id", "<eos>"}, {"type_id", 0}}}}}},
         {"pair", Json::array()},
         {"special_tokens",
          {{"<bos>", {{"id", "<bos>"}, {"ids", {base}}, {"tokens", {"<bos>"}}}},
           {"<eos>", {{"id", "<eos>"}, {"ids", {base + 1}}, {"tokens", {"<eos>"}}}}}}}}}};
  const Tokenizer tokenizer = Tokenizer::from_json(json.dump());
  const int64_t a = json["model"]["vocab"]["a"];
  const Encoding encoding = tokenizer.encode("a", true);
  EXPECT_EQ(encoding.ids, (std::vector<int64_t>{base, a, base + 1}));
  EXPECT_EQ(encoding.spans, (std::vector<ByteSpan>{{0, 0}, {0, 1}, {1, 1}}));
  EXPECT_EQ(tokenizer.encode("a", false).ids, (std::vector<int64_t>{a}));
}

TEST(Tokenizer, WhatIsNotSupportedIsNamed) {
  struct Case {
    const char* pointer;
    Json value;
    const char* expected;  // in the message, beside the file name
  };
  const std::vector<Case> cases = {
      {"/model/dropout", 0.1, "model.dropout is 0.1"},
      {"/model/byte_fallback", true, "model.byte_fallback is true"},
      {"/model/type", "Unigram", "model.type is \"Unigram\""},
      {"/model/end_of_word_suffix", "</w>", "model.end_of_word_suffix"},
      {"/model/unk_token", "<nope>", "model.unk_token"},
      {"/model/merges/0", "a b c", "model.merges[0] is \"a b c\""},
      {"/model/merges/0", Json::array({"a"}), "model.merges[0]"},
      {"/model/merges/1", "a zz", "model.merges[1]"},
      {"/model/vocab/a", -1, "model.vocab is -1"},
      {"/model/vocab/a", 3000000000u, "model.vocab is 3000000000"},
      {"/model/vocab/a", 3, "taken by another token"},
      {"/model/new_key", 1, "model.new_key is 1"},
      {"/truncation", {{"max_length", 5}}, "truncation"},
      {"/padding", {{"strategy", {{"Fixed", 8}}}}, "padding"},
      {"/normalizer", {{"type", "NFKC"}}, "normalizer.type is \"NFKC\""},
      {"/normalizer",
       {{"type", "Sequence"}, {"normalizers", {{{"type", "Lowercase"}}}}},
       "normalizers[0].type"},
      {"/pre_tokenizer", nullptr, "pre_tokenizer is null"},
      {"/pre_tokenizer", {{"type", "Metaspace"}}, "pre_tokenizer.type is \"Metaspace\""},
      {"/pre_tokenizer", {{"type", "Digits"}}, "a ByteLevel step is expected"},
      {"/pre_tokenizer/use_regex", 3, "pre_tokenizer.use_regex is 3"},
      {"/decoder", nullptr, "decoder is missing"},
      {"/decoder", {{"type", "Metaspace"}}, "decoder.type"},
      {"/post_processor", {{"type", "BertProcessing"}}, "post_processor.type"},
      {"/added_tokens", Json::array({added(99999999, "<x>")}), "added_tokens[0].id"},
      {"/added_tokens", Json::array({added(0, "<x>")}), "taken by another token"},
      {"/added_tokens", Json::array({added(9000, "a")}), "in the vocabulary"},
      {"/added_tokens", Json::array({added(9000, "")}), "empty"},
      {"/more", 1, "more is 1"},
  };
  ASSERT_EQ(error_of(small_json()), "none");
  for (const Case& one : cases) {
    Json json = small_json();
    json[Json::json_pointer(one.pointer)] = one.value;
    const std::string message = error_of(json);
    EXPECT_NE(message.find("t.json"), std::string::npos) << message;
    EXPECT_NE(message.find(one.expected), std::string::npos) << one.pointer << ": " << message;
  }
  EXPECT_THROW(Tokenizer::from_json("{"), BadConfig);
  EXPECT_THROW(Tokenizer::from_json("[]"), BadConfig);
  EXPECT_THROW(Tokenizer::from_json(std::string(100000, '[')), BadConfig);
  EXPECT_THROW(Tokenizer::from_file(kData + "no such file"), BadConfig);
}

// Truncating or damaging the file anywhere gives BadConfig or a tokenizer, never anything else.
TEST(Tokenizer, DamagedFilesAreRefused) {
  const std::string whole = small_json().dump();
  const Random random(2, Purpose::kTest);
  for (uint64_t round = 0; round < 600; ++round) {
    std::string bytes = whole;
    if (round % 2)
      bytes.resize(random.below(3 * round, whole.size()));
    else
      bytes[random.below(3 * round, whole.size())] = static_cast<char>(random.below(3 * round + 1, 256));
    try {
      Tokenizer::from_json(bytes).encode("hello abc");
    } catch (const BadConfig&) {
    }
  }
}

TEST(Tokenizer, ManyThreadsShareOne) {
  const Json cases = read_json(kData + "tokenizer/strings.json");
  std::vector<std::thread> threads;
  std::atomic<int> wrong = 0;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&] {
      for (const Json& one : cases)
        if (smollm().encode(one["text"].get<std::string>()).ids != one["ids"].get<std::vector<int64_t>>())
          ++wrong;
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

class Folder : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::path(TITANIUM_BINARY_DIR) / "text_folder_test" /
              ::testing::UnitTest::GetInstance()->current_test_info()->name();
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
    json_ = small_json();
    base_ = static_cast<int64_t>(json_["model"]["vocab"].size());
    json_["added_tokens"] = {added(base_, "<bos>"), added(base_ + 1, "<eos>")};
    write("tokenizer.json", json_.dump());
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  void write(const std::string& name, const std::string& bytes) {
    std::filesystem::create_directories((folder_ / name).parent_path());
    std::ofstream(folder_ / name, std::ios::binary) << bytes;
  }
  std::string error() const {
    try {
      Tokenizer::from_folder(folder_);
    } catch (const BadConfig& error) {
      return error.what();
    }
    return "none";
  }
  std::filesystem::path folder_;
  Json json_;
  int64_t base_ = 0;
};

TEST_F(Folder, Bare) {
  const Tokenizer tokenizer = Tokenizer::from_folder(folder_);
  EXPECT_FALSE(tokenizer.special().bos || tokenizer.special().eos);
  EXPECT_TRUE(tokenizer.special().stop.empty());
  EXPECT_TRUE(tokenizer.chat_templates().empty());
}

TEST_F(Folder, SpecialTokensAndTemplates) {
  write("tokenizer_config.json",
        R"({"bos_token": {"content": "<bos>", "lstrip": false}, "pad_token": null, "add_bos_token": true,
            "chat_template": [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]})");
  write("special_tokens_map.json", R"({"eos_token": "<eos>", "pad_token": "<eos>"})");
  Tokenizer tokenizer = Tokenizer::from_folder(folder_);
  EXPECT_EQ(tokenizer.special().bos, base_);
  EXPECT_EQ(tokenizer.special().eos, base_ + 1);
  EXPECT_EQ(tokenizer.special().pad, base_ + 1);
  EXPECT_EQ(tokenizer.special().unk, std::nullopt);
  EXPECT_EQ(tokenizer.special().stop, std::vector<int64_t>{base_ + 1});
  EXPECT_EQ(tokenizer.special_text(tokenizer.special().bos), "<bos>");
  // transformers 5 takes add_bos_token out of the settings where there is a tokenizer.json.
  EXPECT_TRUE(tokenizer.encode("", true).ids.empty());
  EXPECT_EQ(tokenizer.chat_templates(),
            (std::map<std::string, std::string>{{"default", "d"}, {"tool_use", "t"}}));

  write("chat_template.jinja", "file");
  write("additional_chat_templates/rag.jinja", "r");
  write("config.json", R"({"eos_token_id": [3, 9]})");
  EXPECT_EQ(Tokenizer::from_folder(folder_).special().stop, (std::vector<int64_t>{3, 9}));
  write("generation_config.json", R"({"eos_token_id": [5, 7]})");
  tokenizer = Tokenizer::from_folder(folder_);
  EXPECT_EQ(tokenizer.chat_templates(),
            (std::map<std::string, std::string>{{"default", "file"}, {"rag", "r"}}));
  EXPECT_EQ(tokenizer.special().stop, (std::vector<int64_t>{5, 7}));
}

TEST_F(Folder, StopIdsAreBelowTheModelsVocabulary) {
  write("config.json", R"({"vocab_size": 300, "eos_token_id": 5})");
  write("generation_config.json", R"({"eos_token_id": [5, 299]})");
  EXPECT_EQ(Tokenizer::from_folder(folder_).special().stop, (std::vector<int64_t>{5, 299}));
  write("generation_config.json", R"({"eos_token_id": [5, 300]})");
  EXPECT_NE(error().find("generation_config.json: eos_token_id is [5,300]; ids from 0 to 299"),
            std::string::npos)
      << error();
  write("generation_config.json", R"({})");
  write("config.json", R"({"vocab_size": 300, "eos_token_id": 99999999})");
  EXPECT_NE(error().find("config.json: eos_token_id is 99999999; ids from 0 to 299"), std::string::npos)
      << error();
}

TEST_F(Folder, AddedTokensOfTheConfig) {
  write("tokenizer_config.json", R"({"added_tokens_decoder": {")" + std::to_string(base_ + 2) +
                                     R"(": {"content": "<more>", "special": true}}})");
  const Tokenizer tokenizer = Tokenizer::from_folder(folder_);
  EXPECT_EQ(tokenizer.encode("<more>").ids, std::vector<int64_t>{base_ + 2});
}

TEST_F(Folder, ErrorsNameFileAndKey) {
  struct Case {
    const char *file, *text, *expected;
  };
  for (const Case& one :
       {Case{"tokenizer_config.json", R"({"bos_token": "<nope>"})", "bos_token '<nope>'"},
        {"tokenizer_config.json", R"({"bos_token": 3})", "bos_token is 3"},
        {"tokenizer_config.json", R"({"added_tokens_decoder": {"x": {}}})", "added_tokens_decoder.x"},
        {"tokenizer_config.json", R"({"chat_template": 3})", "chat_template"},
        {"tokenizer_config.json", R"([])", "an object is expected"},
        {"generation_config.json", R"({"eos_token_id": "x"})", "eos_token_id is \"x\""},
        {"special_tokens_map.json", R"({"eos_token": "<nope>"})", "eos_token '<nope>'"}}) {
    write(one.file, one.text);
    const std::string message = error();
    EXPECT_NE(message.find(one.file), std::string::npos) << message;
    EXPECT_NE(message.find(one.expected), std::string::npos) << message;
    std::filesystem::remove(folder_ / one.file);
  }
  std::filesystem::remove(folder_ / "tokenizer.json");
  EXPECT_NE(error().find("tokenizer.json"), std::string::npos);
}

}  // namespace
}  // namespace titanium

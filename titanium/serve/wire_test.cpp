#include "titanium/serve/wire.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "titanium/base/random.h"

namespace titanium {
namespace {

std::string blob_of(Message message) {
  std::string blob = encode_header(message);
  for (const TensorView& view : message.tensors) {
    blob.append(reinterpret_cast<const char*>(view.data), view.nbytes);
  }
  return blob;
}

Message decode(const std::string& blob) {
  return decode_message(std::as_bytes(std::span(blob)), nullptr);
}

std::string failure(const std::string& blob) {
  try {
    decode(blob);
  } catch (const BadData& error) {
    return error.what();
  }
  return "";
}

TEST(Wire, AFrameIsTwentyFourBytesInDocumentedOrder) {
  const auto bytes = encode_frame({1, 0x0102030405});
  const char expected[] = "titanium\x01\x00\x00\x00\x01\x00\x00\x00\x05\x04\x03\x02\x01\x00\x00\x00";
  ASSERT_EQ(sizeof expected - 1, kFrameBytes);
  EXPECT_EQ(std::memcmp(bytes.data(), expected, kFrameBytes), 0);
  const Frame frame = decode_frame(bytes);
  EXPECT_EQ(frame.fds, 1u);
  EXPECT_EQ(frame.bytes, 0x0102030405u);
}

TEST(Wire, AFrameOfSomethingElseIsRefused) {
  const auto refused = [](size_t at, int value) {
    auto bytes = encode_frame({0, 8});
    bytes[at] = static_cast<std::byte>(value);
    try {
      decode_frame(bytes);
    } catch (const BadData& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_NE(refused(0, 'G').find("does not speak"), std::string::npos);
  EXPECT_NE(refused(8, 2).find("version 2"), std::string::npos);
  EXPECT_NE(refused(12, 2).find("2 descriptors"), std::string::npos);
  EXPECT_NE(refused(23, 1).find("allowed are"), std::string::npos);
  EXPECT_EQ(refused(16, 9), "");
}

TEST(Wire, AMessageComesBack) {
  Message call = Message::call("train_batch", 7);
  call.body = {{"forward_only", true}, {"text", "naïve"}, {"number", 0.1}};
  call.add("mask", Dtype::U8, {3}, std::as_bytes(std::span("\1\0\1", 3)));
  call.add("ids", std::vector<int64_t>{5, -6});
  call.add("empty", std::vector<double>{});
  const std::string blob = blob_of(call);
  const Message back = decode(blob);
  EXPECT_EQ(back.type, Message::Type::kCall);
  EXPECT_EQ(back.name, "train_batch");
  EXPECT_EQ(back.id, 7);
  EXPECT_EQ(back.body, call.body);
  EXPECT_EQ(back.at("mask").nbytes, 3u);
  EXPECT_EQ(back.at("mask").data[2], std::byte{1});
  EXPECT_EQ(back.at("empty").nbytes, 0u);
  // Wide tensors first: each lies at a multiple of its element's size.
  EXPECT_EQ((back.at("ids").data - reinterpret_cast<const std::byte*>(blob.data())) % 8, 0);
  int64_t ids[2];
  std::memcpy(ids, back.at("ids").data, sizeof ids);
  EXPECT_EQ(ids[1], -6);
  EXPECT_THROW(back.at("nothing"), BadData);

  const Message reply = decode(blob_of(Message::reply_to(call)));
  EXPECT_EQ(reply.type, Message::Type::kReply);
  EXPECT_EQ(reply.id, 7);
  const Message error = decode(blob_of(Message::error_to(9, "BadData", "row 3 \xff is bad")));
  EXPECT_EQ(error.type, Message::Type::kError);
  EXPECT_EQ(error.name, "BadData");
  EXPECT_EQ(error.text, "row 3 \xEF\xBF\xBD is bad")
      << "bytes that are no UTF-8 are mended, not a second error";
}

TEST(Wire, MetadataMustSayOneThing) {
  const auto blob = [](const Metadata& metadata) { return safetensors_header({}, metadata); };
  EXPECT_NE(failure(blob({{"id", "1"}})).find("exactly one"), std::string::npos);
  EXPECT_NE(failure(blob({{"id", "1"}, {"method", "a"}, {"reply", "a"}, {"args", "{}"}})).find("exactly one"),
            std::string::npos);
  EXPECT_NE(failure(blob({{"method", "a"}, {"args", "{}"}})).find("no 'id'"), std::string::npos);
  EXPECT_NE(failure(blob({{"id", "one"}, {"method", "a"}, {"args", "{}"}})).find("'one'"), std::string::npos);
  EXPECT_NE(failure(blob({{"id", "99999999999999999999"}, {"method", "a"}, {"args", "{}"}})), "");
  EXPECT_NE(failure(blob({{"id", "1"}, {"method", "a"}})).find("no 'args'"), std::string::npos);
  EXPECT_NE(failure(blob({{"id", "1"}, {"method", "a"}, {"args", "[]"}})).find("array"), std::string::npos);
  EXPECT_NE(failure(blob({{"id", "1"}, {"method", "a"}, {"args", "{"}})).find("not valid JSON"),
            std::string::npos);
  EXPECT_NE(failure(blob({{"id", "1"}, {"method", "a"}, {"args", "{}"}, {"x", ""}})).find("'x'"),
            std::string::npos);
  EXPECT_NE(failure(blob({{"id", "1"}, {"error", "Bug"}})).find("no 'message'"), std::string::npos);
  const std::string deep(1000, '[');
  EXPECT_NE(failure(blob({{"id", "1"}, {"method", "a"}, {"args", deep}})), "");
  EXPECT_EQ(failure(blob({{"id", "1"}, {"method", "a"}, {"args", "{}"}})), "");
}

// Every cut and every changed byte of a message is understood or refused as BadData; nothing else comes out.
TEST(Wire, DamagedMessagesAreRefusedOrUnderstood) {
  Message call = Message::call("forward_backward_batch", 12);
  call.body = {{"loss", {{"name", "sft"}}}};
  call.add("input_ids", std::vector<int64_t>{1, 2, 3});
  const std::string blob = blob_of(call);
  for (size_t size = 0; size < blob.size(); ++size) EXPECT_NE(failure(blob.substr(0, size)), "") << size;
  const Random random(3, Purpose::kTest);
  int refused = 0;
  for (uint64_t i = 0; i < 4000; ++i) {
    std::string damaged = blob;
    damaged[random.below(2 * i, blob.size())] = static_cast<char>(random.bits(2 * i + 1));
    refused += !failure(damaged).empty();
  }
  EXPECT_GT(refused, 2000);
}

TEST(Wire, NumbersThatAreNotFiniteCross) {
  const double inf = std::numeric_limits<double>::infinity();
  const auto there_and_back = [](double x) { return as_number(Json::parse(json_number(x).dump()), "x"); };
  EXPECT_EQ(there_and_back(inf), inf);
  EXPECT_EQ(there_and_back(-inf), -inf);
  EXPECT_TRUE(std::isnan(there_and_back(std::nan(""))));
  EXPECT_EQ(there_and_back(0.1), 0.1);
  EXPECT_THROW(as_number(Json("1"), "x"), BadData);
  EXPECT_THROW(as_number(Json(), "x"), BadData);
}

}  // namespace
}  // namespace titanium

// Hugging Face folders and many ranks, as threads.
#include <gtest/gtest.h>

#include <map>

#include "titanium/formats/test_util.h"
#include "titanium/weights/hf_export.h"
#include "titanium/weights/hf_load.h"
#include "titanium/weights/toy_ranks.h"

namespace titanium {
namespace {

namespace fs = std::filesystem;
using testing::error_of;
using testing::kLayouts;
using testing::Layout;
using testing::on_ranks;
using testing::TempFolder;
using testing::ToyRank;

void export_on_one(const fs::path& folder, const HfExportOptions& options = {}) {
  on_ranks({1, 1, 1}, [&](ToyRank& rank) {
    rank.fill();
    export_hf(*rank.store, Json::object(), folder, options);
  });
}

// G07.
TEST(LoadHfRanks, EachReadsItsShareAndAllAreWritten) {
  const TempFolder folder;
  export_on_one(folder / "m");
  const uint64_t all = HfTensors(folder / "m").total_bytes();
  for (const Layout& layout : kLayouts) {
    SCOPED_TRACE(::testing::PrintToString(layout));
    std::vector<uint64_t> bytes(layout.ranks());
    on_ranks(layout, [&](ToyRank& rank) {
      rank.spoil();
      for (const auto& unit : rank.store->units()) unit->unshard();
      const HfLoadReport report = load_hf(folder / "m", *rank.store);
      EXPECT_EQ(rank.wrong(/*masters_only=*/true), "") << "rank " << rank.mesh.rank();
      EXPECT_EQ(report.tensors, static_cast<int64_t>(rank.table.weights().size()));
      EXPECT_EQ(report.stored, (std::vector<Dtype>{Dtype::F32}));
      bytes[rank.mesh.rank()] = report.bytes;
      EXPECT_EQ(report.bytes, static_cast<uint64_t>(rank.owned() * 4));
      // What blocks saw is stale on every rank, also where this one owns nothing.
      for (const auto& unit : rank.store->units()) {
        EXPECT_TRUE(unit->whole() || !unit->current().defined()) << unit->name();
      }
    });
    uint64_t sum = 0;
    for (const uint64_t b : bytes) sum += b;
    EXPECT_EQ(sum, all * layout.replicate);
  }
}

TEST(LoadHfRanks, ConvertsAlsoInColumns) {
  const TempFolder folder;
  export_on_one(folder / "m", {.dtype = Dtype::BF16});
  on_ranks({1, 2, 3},
           [&](ToyRank& rank) {
             load_hf(folder / "m", *rank.store);
             EXPECT_EQ(rank.wrong(true), "");
           },
           {at::kBFloat16, at::kBFloat16, at::kFloat});
}

TEST(LoadHfRanks, WhatOneRankFindsIsRefusedByAll) {
  const TempFolder folder;
  export_on_one(folder / "m");
  const HfTensors tensors(folder / "m");
  std::vector<TensorView> views;
  for (const std::string& name : tensors.names()) views.push_back(tensors.at(name));
  TensorView twin = tensors.at("model.embed_tokens.weight");
  std::vector<std::byte> other(twin.data, twin.data + twin.nbytes);
  twin.name = "lm_head.weight";
  twin.data = other.data();
  views.push_back(twin);
  fs::create_directory(folder / "tied");
  write_safetensors(folder / "tied/model.safetensors", views);
  const auto load = [&] {
    std::vector<std::string> errors(4);
    on_ranks({1, 2, 2}, [&](ToyRank& rank) {
      rank.spoil();
      uint64_t bytes = 0;
      errors[rank.mesh.rank()] = error_of([&] { bytes = load_hf(folder / "tied", *rank.store).bytes; });
      for (const Slice& slice : rank.store->slices()) {
        const bool same = slice.of(slice.unit->shard()).eq(5).all().item<bool>();
        EXPECT_EQ(same, errors[rank.mesh.rank()] != "nothing");
        bytes -= bytes > 0 ? slice.count() * 4 * (slice.weight->shared() ? 2 : 1) : 0;
      }
      EXPECT_EQ(bytes, 0u);  // of both names where there are both
    });
    for (const std::string& error : errors) EXPECT_EQ(error, errors[0]);
    return errors[0];
  };
  EXPECT_EQ(load(), "nothing");
  other.back() ^= std::byte{1};  // of the last rows
  fs::remove(folder / "tied/model.safetensors");
  write_safetensors(folder / "tied/model.safetensors", views);
  const std::string error = load();
  EXPECT_SAYS(error, "BadCheckpoint: rank ");
  EXPECT_SAYS(error, "are one weight (tie_word_embeddings)");
  fs::remove(folder / "tied/model.safetensors");
  EXPECT_SAYS(load(), "BadCheckpoint: rank 0: ");
}

std::map<std::string, std::string> files_of(const fs::path& folder) {
  std::map<std::string, std::string> files;
  for (const auto& entry : fs::directory_iterator(folder))
    files[entry.path().filename().string()] = read_file(entry.path());
  return files;
}

TEST(ExportHfRanks, TheBytesAreThoseOfOneRank) {
  const TempFolder folder;
  const HfExportOptions all[] = {
      {}, {.dtype = Dtype::BF16, .max_shard_bytes = 2000, .owner = "me"}, {.dtype = Dtype::F64}};
  for (const HfExportOptions& options : all) {
    fs::remove_all(folder / "one");
    export_on_one(folder / "one", options);
    for (const Layout& layout : kLayouts) {
      fs::remove_all(folder / "many");
      on_ranks(layout, [&](ToyRank& rank) {
        rank.fill();
        export_hf(*rank.store, Json::object(), folder / "many", options);
      });
      EXPECT_EQ(files_of(folder / "many"), files_of(folder / "one")) << ::testing::PrintToString(layout);
    }
  }
  EXPECT_GT(files_of(folder / "one").size(), 1u);
}

TEST(ExportHfRanks, WhatFailsOnOneFailsOnAllAndKeepsTheOlder) {
  const TempFolder folder;
  export_on_one(folder / "out");
  const auto before = files_of(folder / "out");
  const auto errors_of = [&](const Json& config, const HfExportOptions& options) {
    std::vector<std::string> errors(4);
    on_ranks({1, 2, 2}, [&](ToyRank& rank) {
      try {
        export_hf(*rank.store, config, folder / "out", options);
      } catch (const std::exception& e) {
        errors[rank.mesh.rank()] = e.what();
      }
    });
    for (const std::string& error : errors) EXPECT_EQ(error, errors[0]);
    EXPECT_EQ(files_of(folder / "out"), before);
    EXPECT_EQ(folder.files(), 1u);
    return errors[0];
  };
  EXPECT_SAYS(errors_of(Json::object(), {}), "rank 0: ");
  EXPECT_SAYS(errors_of(Json::object(), {}), "exists already");
  EXPECT_SAYS(errors_of({{"a", "\xff"}}, {.overwrite = true}), "rank 0: ");
}

}  // namespace
}  // namespace titanium

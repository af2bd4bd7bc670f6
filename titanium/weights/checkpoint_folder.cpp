#include "titanium/weights/checkpoint_folder.h"

#include <algorithm>

#include "titanium/base/error.h"
#include "titanium/dist/agree.h"
#include "titanium/weights/checkpoint.h"
#include "titanium/weights/manifest.h"

namespace titanium {
namespace {

namespace fs = std::filesystem;

void check(const std::error_code& error, const fs::path& path, const char* what) {
  if (error) throw BadCheckpoint("{}: {}: {}", path.string(), what, error.message());
}

struct Entry {
  fs::path path;
  int64_t step = 0;
  std::string ending;
};

// Folders with a name of ours, by step; empty when there is no such folder.
std::vector<Entry> entries_of(const fs::path& folder) {
  std::vector<Entry> entries;
  std::error_code error;
  if (!fs::exists(folder, error)) return entries;
  fs::directory_iterator it(folder, error);
  for (; !error && it != fs::directory_iterator(); it.increment(error)) {
    Entry entry{it->path(), 0, ""};
    std::error_code ignored;
    if (it->is_directory(ignored) &&
        parse_checkpoint_name(it->path().filename().string(), &entry.step, &entry.ending)) {
      entries.push_back(std::move(entry));
    }
  }
  check(error, folder, "cannot be read");
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
    return std::tie(a.step, b.ending) < std::tie(b.step, a.ending);  // "" after ".replaced"
  });
  return entries;
}

// Empty when complete, else what is wrong.
std::string why_incomplete(const fs::path& path) {
  try {
    read_manifest(path);
    return "";
  } catch (const BadCheckpoint& error) {
    return error.what();
  }
}

// Away in one step, so that a kill leaves a checkpoint whole or a wreck, then for good.
void remove(const fs::path& path, const fs::path& wreck) {
  std::error_code error;
  if (path != wreck) {
    fs::remove_all(wreck, error);
    check(error, wreck, "cannot be removed");
    fs::rename(path, wreck, error);
    check(error, path, "cannot be renamed");
  }
  fs::remove_all(wreck, error);
  check(error, wreck, "cannot be removed");
}

fs::path with_ending(const fs::path& folder, int64_t step, const char* ending) {
  return folder / (checkpoint_name(step) + ending);
}

}  // namespace

void make_checkpoint_folder(const fs::path& folder) {
  std::error_code error;
  fs::create_directories(folder, error);
  check(error, folder, "cannot be made");
}

void clean_wrecks(const fs::path& folder) {
  for (const Entry& entry : entries_of(folder)) {
    if (entry.ending == ".partial") remove(entry.path, entry.path);
    if (entry.ending != ".replaced") continue;
    const fs::path path = with_ending(folder, entry.step, "");
    std::error_code error;
    if (fs::exists(path, error)) {
      if (why_incomplete(path).empty()) remove(entry.path, with_ending(folder, entry.step, ".partial"));
      continue;
    }
    fs::rename(entry.path, path, error);
    check(error, entry.path, "cannot be renamed");
  }
}

void put_in_place(const fs::path& partial) {
  const fs::path path = fs::path(partial).replace_extension();
  const fs::path replaced = fs::path(partial).replace_extension(".replaced");
  std::error_code error;
  const bool there = fs::exists(path, error);
  if (there) {
    fs::remove_all(replaced, error);
    check(error, replaced, "cannot be removed");
    fs::rename(path, replaced, error);
    check(error, path, "cannot be renamed");
  }
  fs::rename(partial, path, error);
  check(error, partial, "cannot be put in place");
  sync_folder(path.parent_path().empty() ? "." : path.parent_path());
  if (there) remove(replaced, partial);
}

void keep_latest(const fs::path& folder, int64_t k, int64_t newest) {
  if (k <= 0) return;
  std::vector<CheckpointInfo> complete = list_checkpoints(folder);
  std::erase_if(complete, [&](const CheckpointInfo& c) { return c.step == newest; });
  for (size_t i = 0; i + static_cast<size_t>(k) < complete.size() + 1; ++i) {
    remove(complete[i].path, with_ending(folder, complete[i].step, ".partial"));
  }
}

std::vector<CheckpointInfo> list_checkpoints(const fs::path& folder) {
  std::vector<CheckpointInfo> complete;
  for (const Entry& entry : entries_of(folder)) {
    if (entry.ending == ".partial" || !why_incomplete(entry.path).empty()) continue;
    // A replaced one counts while the one that replaces it is not there.
    if (!complete.empty() && complete.back().step == entry.step) complete.pop_back();
    complete.push_back({entry.path, entry.step});
  }
  return complete;
}

LatestCheckpoint find_latest(const fs::path& folder) {
  LatestCheckpoint latest;
  const std::vector<Entry> entries = entries_of(folder);
  for (auto entry = entries.rbegin(); entry != entries.rend(); ++entry) {
    if (entry->ending == ".partial") {
      latest.warnings.push_back(
          fmt::format("{}: passed over: a save that was interrupted", entry->path.string()));
      continue;
    }
    const std::string why = why_incomplete(entry->path);
    if (why.empty()) {
      latest.found = CheckpointInfo{entry->path, entry->step};
      break;
    }
    latest.warnings.push_back(fmt::format("{}: passed over: {}", entry->path.string(), why));
    latest.damaged = true;
  }
  return latest;
}

LatestCheckpoint find_latest(const fs::path& folder, const Group& ranks) {
  LatestCheckpoint latest;
  agree(ranks, [&] {
    if (ranks.rank() == 0) latest = find_latest(folder);
  });
  if (ranks.size() == 1) return latest;
  Json mine = {{"warnings", latest.warnings}, {"damaged", latest.damaged}};
  if (latest.found) mine["found"] = {latest.found->path.string(), latest.found->step};
  const Json first =
      Json::parse(ranks.exchange(mine.dump(-1, ' ', false, Json::error_handler_t::replace))[0]);
  latest.warnings = first.at("warnings").get<std::vector<std::string>>();
  latest.damaged = first.at("damaged").get<bool>();
  latest.found.reset();
  if (first.contains("found"))
    latest.found = CheckpointInfo{first["found"][0].get<std::string>(), first["found"][1].get<int64_t>()};
  return latest;
}

}  // namespace titanium

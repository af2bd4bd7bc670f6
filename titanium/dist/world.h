// All ranks of a run, as one of them sees it: the rank object (design D10).  Nothing in it is process-wide,
// so ranks can be threads of one process.
#pragma once
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "titanium/dist/group.h"

namespace titanium {

class World {
 public:
  virtual ~World() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;

  // The group of these ranks, which hold this one; ascending.  Made by its members alone, at the first call;
  // the same ranks and purpose give the same group.  Another purpose gives another channel, for a thread of
  // its own (an async save).
  virtual Group group(const std::vector<int>& ranks, const std::string& purpose = "") = 0;
  Group all(const std::string& purpose = "");

  // What this rank is doing, for the messages of others when it stops answering.  Cheap, from any thread.  A
  // step of -1 keeps the one before.
  virtual void progress(int64_t step, std::string_view action) = 0;

  // Ends the run for all: the others' collectives throw RankLost with this rank and reason, at once.
  virtual void fail(const std::string& reason) noexcept = 0;
};

// A world of one.
std::shared_ptr<World> solo_world();

}  // namespace titanium

// Bytes from one rank of a group to another: what collectives across hosts are written over.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "titanium/dist/transport.h"

namespace titanium {

// Ranks count within the group.  What one rank sends to another under a tag arrives in order.
class Wires {
 public:
  // Under way.  Its memory must stay until wait() has returned, or until it is destroyed, which gives it up.
  class Transfer {
   public:
    virtual ~Transfer() = default;
    virtual void wait() = 0;  // RankLost
  };
  virtual ~Wires() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // Names the collective whose transfers follow, for messages: "an all_gather of 128 bytes".  RankLost when
  // the run has failed.
  virtual void begin(const std::string& what) = 0;
  virtual std::unique_ptr<Transfer> send(int to, uint32_t tag, const void* data, size_t bytes) = 0;
  virtual std::unique_ptr<Transfer> receive(int from, uint32_t tag, void* data, size_t bytes) = 0;
};

// Every collective of a Transport.  Sums are in rank order: each rank receives its part of every other rank
// and adds, which moves no more bytes than a ring does.  Tensors of a device pass through memory of the host.
std::unique_ptr<Transport> wire_transport(std::unique_ptr<Wires> wires);

}  // namespace titanium

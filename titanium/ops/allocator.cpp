#include "titanium/ops/allocator.h"

#include <c10/core/CPUAllocator.h>
#include <sys/mman.h>

#include <cstring>
#include <limits>
#include <list>
#include <mutex>

namespace titanium {
namespace {

constexpr int64_t kStep = 64 << 10;  // bytes; blocks are multiples of it

struct Block {
  void* data;
  int64_t bytes;
};

class BlockAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t n) override {
    if (n < static_cast<size_t>(kLeastBlock)) return c10::GetDefaultCPUAllocator()->allocate(n);
    const int64_t bytes = (static_cast<int64_t>(n) + kStep - 1) / kStep * kStep;
    Block* block = take(bytes);
    if (block == nullptr) block = make(bytes);
    return {block->data, block, &give_back, c10::Device(c10::kCPU)};
  }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }

  BlockUse use() {
    const std::lock_guard lock(mutex_);
    return use_;
  }
  // The ones freed first go first, until at most so many bytes are free or so many have gone.
  void release(int64_t most_free, int64_t enough = std::numeric_limits<int64_t>::max()) {
    std::list<Block*> released;
    {
      const std::lock_guard lock(mutex_);
      while (use_.free > most_free && enough > 0) {
        use_.free -= free_.front()->bytes;
        enough -= free_.front()->bytes;
        released.splice(released.end(), free_, free_.begin());
      }
    }
    for (Block* block : released) {
      munmap(block->data, block->bytes);
      delete block;
    }
  }

  static BlockAllocator& instance() {
    static auto* const allocator = new BlockAllocator;  // outlives every tensor
    return *allocator;
  }

 private:
  // The smallest free block of at most an eighth more; of those the one freed last, which the caches know.
  Block* take(int64_t bytes) {
    const std::lock_guard lock(mutex_);
    auto best = free_.end();
    for (auto at = free_.begin(); at != free_.end(); ++at) {
      const int64_t size = (*at)->bytes;
      if (size >= bytes && size <= bytes + bytes / 8 && (best == free_.end() || size <= (*best)->bytes))
        best = at;
    }
    if (best == free_.end()) return nullptr;
    Block* block = *best;
    free_.erase(best);
    use_.free -= block->bytes;
    use_.used += block->bytes;
    return block;
  }

  Block* make(int64_t bytes) {
    release(kMostFreeBlocks, bytes);
    auto* block = new Block{map_pages(bytes), bytes};
    const std::lock_guard lock(mutex_);
    use_.used += bytes;
    return block;
  }

  static void give_back(void* context) {
    auto* block = static_cast<Block*>(context);
    BlockAllocator& a = instance();
    const std::lock_guard lock(a.mutex_);
    a.use_.used -= block->bytes;
    a.use_.free += block->bytes;
    a.free_.push_back(block);
  }

  std::mutex mutex_;
  std::list<Block*> free_;  // the one freed first comes first
  BlockUse use_;
};

}  // namespace

void use_block_allocator() {
  c10::SetCPUAllocator(&block_allocator(), /*priority=*/1);
}

c10::Allocator& block_allocator() {
  return BlockAllocator::instance();
}

BlockUse block_use() {
  return BlockAllocator::instance().use();
}

void release_free_blocks() {
  BlockAllocator::instance().release(0);
}

void* map_pages(int64_t bytes) {
  const auto map = [bytes] {
    return mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  };
  void* data = map();
  if (data == MAP_FAILED) {
    release_free_blocks();
    data = map();
  }
  TORCH_CHECK(data != MAP_FAILED, "can't allocate memory: ", bytes, " bytes were refused");
  madvise(data, bytes, MADV_HUGEPAGE);  // fewer faults at the first touch; a hint only
  return data;
}

}  // namespace titanium

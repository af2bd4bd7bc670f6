// Where the memory of tensors comes from in a program of ours.
#pragma once
#include <c10/core/Allocator.h>

#include <cstdint>

namespace titanium {

constexpr int64_t kLeastBlock = 256 << 10;     // bytes; smaller tensors are malloc's
constexpr int64_t kMostFreeBlocks = 32 << 20;  // bytes that stay free when a new block is made

// From here on large tensors of this process are blocks that serve tensors of about their size again and
// again.  malloc would cut what one tensor leaves for the next smaller one, and where tensors of a moment lie
// between such as live for a whole micro-batch, the holes take as much memory as those.  The most that all
// blocks take is what tensors have had at once and kMostFreeBlocks.  Call it at the start of the program.
void use_block_allocator();
c10::Allocator& block_allocator();  // without making it everyone's

struct BlockUse {
  int64_t used = 0, free = 0;  // bytes
};
BlockUse block_use();

// Gives the free ones back to the system.
void release_free_blocks();

// Pages of zeros straight from the system, huge ones where it has them; munmap gives them back.  Where it
// refuses, free blocks are given back first; then c10::Error, as ATen's own.
void* map_pages(int64_t bytes);

}  // namespace titanium

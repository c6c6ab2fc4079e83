// What a backward pass is divided into: key heads that one owner alone writes.
#pragma once

#include "passes/pass.h"

#include <memory>
#include <vector>

namespace streamkl::cpu {

// Distributions [first, last) of a sequence, whose blocks of rows these are: no other owner adds to the dK of their
// key heads.
struct KeyOwner {
  std::shared_ptr<const std::vector<Block>> blocks;
  int64_t first, last;
};

inline std::vector<KeyOwner> key_owners_of(const Tensor& table, const Window& window, int64_t rows, int64_t heads, int64_t together) {
  std::vector<KeyOwner> owners;
  for (const auto& seq : sequences_of(table)) {
    const auto blocks = std::make_shared<const std::vector<Block>>(blocks_of(seq, window, rows));
    if (blocks->empty()) continue;
    for (int64_t r = 0; r < heads; r += together) owners.push_back({blocks, r, r + together});
  }
  return owners;
}

}  // namespace streamkl::cpu

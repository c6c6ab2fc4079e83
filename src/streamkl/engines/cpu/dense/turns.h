// How a backward pass is deterministic with one dK for all threads: blocks of rows add to a tile of keys in turn.
#pragma once

#include "passes/key_owners.h"
#include "passes/owner_queues.h"

#include <atomic>
#include <vector>

namespace streamkl::cpu {

// The tasks of a key owner are its blocks of rows, each for every distribution, in a fixed order: last rows first.
// Threads take them in this order, and where two tasks add to the same tile of keys, they do so in this order. So sums
// do not depend on the number of threads, and the first unfinished task never waits. Within a block tiles rise: the
// previous task has usually left a tile when the next one reaches it, so waiting is rare. The last rows come first
// because they see the most keys under a causal mask.
class Turns {
 public:
  explicit Turns(const std::vector<KeyOwner>& owners) : owners_(owners), queues_(task_counts(owners)) {
    int64_t tiles = 0;
    for (const auto& owner : owners) {
      tiles_.push_back(tiles);
      tiles += tile_of(owner.blocks->back().j1 - 1) + 1;
    }
    turn_ = std::vector<std::atomic<int64_t>>(tiles);
    // The tasks that see a tile are consecutive, so it is enough to store the first of them.
    for (size_t o = 0; o < owners.size(); o++)
      for (int64_t task = task_count(owners[o]) - heads(o); task >= 0; task -= heads(o)) {
        const Block& block = block_of(o, task);
        for (int64_t tile = tile_of(block.j0); tile <= tile_of(block.j1 - 1); tile++) turn_[tiles_[o] + tile] = task;
      }
  }

  // A task that a thread has taken.
  struct Task : OwnedTask {
    Turns& turns;
    explicit Task(Turns& turns) : turns(turns) {}
    const Block& block() const { return turns.block_of(owner, number); }
    int64_t head() const { return turns.owners_[owner].first + number % turns.heads(owner); }

    // Runs work, which adds to the keys of a tile, when it is the task's turn.
    template <typename Work>
    void add(const KeyTile& tile, const Work& work) const {
      auto& turn = turns.turn_[turns.tiles_[owner] + tile_of(tile.j0)];
      wait_until(turns.abandoned_, [&] { return turn.load(std::memory_order_acquire) == number; });
      work();
      turn.store(number + 1, std::memory_order_release);
    }
  };

  bool take(Task& task) { return queues_.take(task); }
  int64_t tasks() const { return queues_.tasks(); }
  // Stops all waiting, after a task has failed.
  void abandon() { abandoned_ = true; }

 private:
  static int64_t tile_of(int64_t key) { return key / kBlockK; }
  static int64_t task_count(const KeyOwner& owner) { return static_cast<int64_t>(owner.blocks->size()) * (owner.last - owner.first); }
  static std::vector<int64_t> task_counts(const std::vector<KeyOwner>& owners) {
    std::vector<int64_t> counts;
    for (const auto& owner : owners) counts.push_back(task_count(owner));
    return counts;
  }
  int64_t heads(int64_t o) const { return owners_[o].last - owners_[o].first; }
  const Block& block_of(int64_t o, int64_t task) const { return (*owners_[o].blocks)[owners_[o].blocks->size() - 1 - task / heads(o)]; }

  const std::vector<KeyOwner>& owners_;
  OwnerQueues queues_;
  std::vector<int64_t> tiles_;  // the first tile of each owner
  std::vector<std::atomic<int64_t>> turn_;  // the task that may add to a tile of an owner's keys
  std::atomic<bool> abandoned_{false};
};

// Visits the tiles of a block, cut at the same keys for all blocks of a sequence.
template <typename Visit>
void each_common_tile(const Block& block, const Visit& visit) {
  for (int64_t j0 = block.j0, j1; j0 < block.j1; j0 = j1) {
    j1 = std::min((j0 / kBlockK + 1) * kBlockK, block.j1);
    visit(KeyTile{j0, j1});
  }
}

// Runs the tasks of a backward pass: make() gives each thread its pass(block, head, task).
template <typename Make>
void each_turn(const std::vector<KeyOwner>& owners, bool fast, const Make& make) {
  Turns turns(owners);
  on_threads(turns.tasks(), [&] {
    const FlushDenormals flush(fast);
    try {
      auto pass = make();
      for (Turns::Task task(turns); turns.take(task);) pass(task.block(), task.head(), task);
    } catch (...) {
      turns.abandon();
      throw;
    }
  });
}

}  // namespace streamkl::cpu

// How a backward pass is deterministic with one dK for all threads: blocks of rows add to a tile of keys in turn.
#pragma once

#include "head_groups.h"

#include <atomic>
#include <mutex>
#include <thread>
#include <vector>

namespace streamkl::cpu {

// The tasks of a head group are its blocks of rows, each for every distribution, in a fixed order: last rows first.
// Threads take them in this order, and where two tasks add to the same tile of keys, they do so in this order. So sums
// do not depend on the number of threads, and the first unfinished task never waits. Within a block tiles rise: the
// previous task has usually left a tile when the next one reaches it, so waiting is rare. The last rows come first
// because they see the most keys under a causal mask.
class Turns {
 public:
  explicit Turns(const std::vector<HeadGroup>& head_groups) : head_groups_(head_groups), queues_(head_groups.size()) {
    int64_t tiles = 0;
    for (size_t g = 0; g < head_groups.size(); g++) {
      queues_[g].tiles = tiles;
      queues_[g].tasks = static_cast<int64_t>(head_groups[g].blocks->size()) * heads(g);
      tiles += tile_of(head_groups[g].blocks->back().j1 - 1) + 1;
      tasks_ += queues_[g].tasks;
    }
    turn_ = std::vector<std::atomic<int64_t>>(tiles);
    // The tasks that see a tile are consecutive, so it is enough to store the first of them.
    for (size_t g = 0; g < head_groups.size(); g++)
      for (int64_t task = queues_[g].tasks - heads(g); task >= 0; task -= heads(g)) {
        const Block& block = block_of(g, task);
        for (int64_t tile = tile_of(block.j0); tile <= tile_of(block.j1 - 1); tile++) turn_[queues_[g].tiles + tile] = task;
      }
  }

  // A task that a thread has taken.
  struct Task {
    Turns& turns;
    int64_t head_group = -1, number = 0;
    const Block& block() const { return turns.block_of(head_group, number); }
    int64_t head() const { return turns.head_groups_[head_group].first + number % turns.heads(head_group); }

    // Runs work, which adds to the keys of a tile, when it is the task's turn.
    template <typename Work>
    void add(const Tile& tile, const Work& work) const {
      auto& turn = turns.turn_[turns.queues_[head_group].tiles + tile_of(tile.j0)];
      for (int64_t waited = 0; turn.load(std::memory_order_acquire) != number; waited++) {
        TORCH_CHECK(!turns.abandoned_.load(std::memory_order_relaxed), "streamkl cpu engine: another thread failed");
        waited < kSpins ? _mm_pause() : std::this_thread::yield();
      }
      work();
      turn.store(number + 1, std::memory_order_release);
    }
  };

  // Gives a thread the next task of its head group, or of the head group with the fewest threads; false if none is
  // left.
  bool take(Task& task) {
    const std::lock_guard lock(mutex_);
    const auto left = [](const Queue& queue) { return queue.taken < queue.tasks; };
    if (task.head_group < 0 || !left(queues_[task.head_group])) {
      if (task.head_group >= 0) queues_[task.head_group].threads--;
      task.head_group = -1;
      for (size_t g = 0; g < queues_.size(); g++)
        if (left(queues_[g]) && (task.head_group < 0 || queues_[g].threads < queues_[task.head_group].threads)) task.head_group = g;
      if (task.head_group < 0) return false;
      queues_[task.head_group].threads++;
    }
    task.number = queues_[task.head_group].taken++;
    return true;
  }

  int64_t tasks() const { return tasks_; }
  // Stops all waiting, after a task has failed.
  void abandon() { abandoned_ = true; }

 private:
  static constexpr int64_t kSpins = 1 << 10;  // before the thread yields its core

  struct Queue {
    int64_t tiles = 0, tasks = 0, taken = 0, threads = 0;
  };

  static int64_t tile_of(int64_t key) { return key / kBlockK; }
  int64_t heads(int64_t g) const { return head_groups_[g].last - head_groups_[g].first; }
  const Block& block_of(int64_t g, int64_t task) const { return (*head_groups_[g].blocks)[head_groups_[g].blocks->size() - 1 - task / heads(g)]; }

  const std::vector<HeadGroup>& head_groups_;
  std::vector<Queue> queues_;
  std::vector<std::atomic<int64_t>> turn_;  // the task that may add to a tile of a head group's keys
  std::atomic<bool> abandoned_{false};
  std::mutex mutex_;
  int64_t tasks_ = 0;
};

// Visits the tiles of a block, cut at the same keys for all blocks of a sequence.
template <typename Visit>
void each_common_tile(const Block& block, const Visit& visit) {
  for (int64_t j0 = block.j0, j1; j0 < block.j1; j0 = j1) {
    j1 = std::min((j0 / kBlockK + 1) * kBlockK, block.j1);
    visit(Tile{j0, j1});
  }
}

// Runs the tasks of a backward pass: make() gives each thread its pass(block, head, task).
template <typename Make>
void each_turn(const std::vector<HeadGroup>& head_groups, bool fast, const Make& make) {
  Turns turns(head_groups);
  on_threads(turns.tasks(), [&] {
    const FlushDenormals flush(fast);
    try {
      auto pass = make();
      for (Turns::Task task{turns}; turns.take(task);) pass(task.block(), task.head(), task);
    } catch (...) {
      turns.abandon();
      throw;
    }
  });
}

}  // namespace streamkl::cpu

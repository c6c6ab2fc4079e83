// How a backward sweep is dealt out so that it is deterministic with one dK: blocks of rows add to a tile of keys in turn.
#pragma once

#include "units.h"

#include <atomic>
#include <mutex>
#include <thread>
#include <vector>

namespace streamkl::cpu {

// The tasks of each unit are its blocks of rows, each for every distribution, in an order of their own: last rows first. Threads
// take them in this order, and where two tasks add to the same tile of keys, they do it in this order. So sums do not depend on
// who makes them or how many do, and the first task that is not done waits for none. Within a block keys rise: then the task
// before has passed a tile when a task comes to it, and waiting is rare. The last rows of a causal problem have the most to do.
class Turns {
 public:
  explicit Turns(const std::vector<Unit>& units) : units_(units), queues_(units.size()) {
    int64_t tiles = 0;
    for (size_t u = 0; u < units.size(); u++) {
      queues_[u].tiles = tiles;
      queues_[u].tasks = static_cast<int64_t>(units[u].blocks->size()) * heads(u);
      tiles += tile_of(units[u].blocks->back().j1 - 1) + 1;
      tasks_ += queues_[u].tasks;
    }
    turn_ = std::vector<std::atomic<int64_t>>(tiles);
    // Those that see a tile follow each other, so that the first of them is all there is to know.
    for (size_t u = 0; u < units.size(); u++)
      for (int64_t task = queues_[u].tasks - heads(u); task >= 0; task -= heads(u)) {
        const Block& block = block_of(u, task);
        for (int64_t tile = tile_of(block.j0); tile <= tile_of(block.j1 - 1); tile++) turn_[queues_[u].tiles + tile] = task;
      }
  }

  // A task that a thread has taken.
  struct Task {
    Turns& turns;
    int64_t unit = -1, number = 0;
    const Block& block() const { return turns.block_of(unit, number); }
    int64_t head() const { return turns.units_[unit].first + number % turns.heads(unit); }

    // Runs work, which adds to a tile's keys, when it is the task's turn.
    template <typename Work>
    void add(const Tile& tile, const Work& work) const {
      auto& turn = turns.turn_[turns.queues_[unit].tiles + tile_of(tile.j0)];
      for (int64_t waited = 0; turn.load(std::memory_order_acquire) != number; waited++) {
        TORCH_CHECK(!turns.abandoned_.load(std::memory_order_relaxed), "streamkl cpu engine: another thread failed");
        waited < kSpins ? _mm_pause() : std::this_thread::yield();
      }
      work();
      turn.store(number + 1, std::memory_order_release);
    }
  };

  // Gives a thread the next task of the unit that it is at, or of the one that fewest are at; false where there is none left.
  bool take(Task& task) {
    const std::lock_guard lock(mutex_);
    const auto left = [](const Queue& queue) { return queue.taken < queue.tasks; };
    if (task.unit < 0 || !left(queues_[task.unit])) {
      if (task.unit >= 0) queues_[task.unit].threads--;
      task.unit = -1;
      for (size_t u = 0; u < queues_.size(); u++)
        if (left(queues_[u]) && (task.unit < 0 || queues_[u].threads < queues_[task.unit].threads)) task.unit = u;
      if (task.unit < 0) return false;
      queues_[task.unit].threads++;
    }
    task.number = queues_[task.unit].taken++;
    return true;
  }

  int64_t tasks() const { return tasks_; }
  // Nobody waits for a task that will not be done.
  void abandon() { abandoned_ = true; }

 private:
  static constexpr int64_t kSpins = 1 << 10;  // then other threads may have the core

  struct Queue {
    int64_t tiles = 0, tasks = 0, taken = 0, threads = 0;
  };

  static int64_t tile_of(int64_t key) { return key / kBlockK; }
  int64_t heads(int64_t u) const { return units_[u].last - units_[u].first; }
  const Block& block_of(int64_t u, int64_t task) const { return (*units_[u].blocks)[units_[u].blocks->size() - 1 - task / heads(u)]; }

  const std::vector<Unit>& units_;
  std::vector<Queue> queues_;
  std::vector<std::atomic<int64_t>> turn_;  // the task that may add to a tile of a unit's keys
  std::atomic<bool> abandoned_{false};
  std::mutex mutex_;
  int64_t tasks_ = 0;
};

// Visits the tiles of a block, cut where those of all blocks of its sequence are.
template <typename Visit>
void each_common_tile(const Block& block, const Visit& visit) {
  for (int64_t j0 = block.j0, j1; j0 < block.j1; j0 = j1) {
    j1 = std::min((j0 / kBlockK + 1) * kBlockK, block.j1);
    visit(Tile{j0, j1});
  }
}

// Runs the tasks of a backward sweep: sweep(block, head, task) of what make() makes a thread.
template <typename Make>
void each_turn(const std::vector<Unit>& units, bool fast, const Make& make) {
  Turns turns(units);
  on_threads(turns.tasks(), [&] {
    const FlushDenormals flush(fast);
    try {
      auto sweep = make();
      for (Turns::Task task{turns}; turns.take(task);) sweep(task.block(), task.head(), task);
    } catch (...) {
      turns.abandon();
      throw;
    }
  });
}

}  // namespace streamkl::cpu

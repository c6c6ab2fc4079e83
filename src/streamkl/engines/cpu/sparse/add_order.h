// How the backward of sparse attention is deterministic with one dK and one dV for all threads: query blocks add to a
// key in a fixed order.
#pragma once

#include "passes/owner_queues.h"
#include "passes/pass.h"

#include <atomic>
#include <limits>
#include <memory>
#include <vector>

namespace streamkl::cpu {

// The tasks of each owner add to keys in their order: a task adds to keys up to some key once all tasks before it have
// passed that key. Keys rise within a task, so tasks follow each other through the keys as in dense/turns.h, and the
// first unfinished task never waits. Sums do not depend on the number of threads.
class AddOrder {
 public:
  explicit AddOrder(const std::vector<int64_t>& tasks_of_owners) : queues_(tasks_of_owners) {
    for (const int64_t tasks : tasks_of_owners) owners_.push_back(std::make_unique<Owner>(tasks));
  }

  // Runs work, which adds to keys up to `last`, when all tasks before have passed them.
  template <typename Work>
  void add(const OwnedTask& task, int64_t last, const Work& work) {
    Owner& owner = *owners_[task.owner];
    for (int64_t n = owner.finished.load(std::memory_order_acquire); n < task.number; n++) {
      wait_until(abandoned_, [&] { return owner.passed[n].load(std::memory_order_acquire) > last; });
      if (owner.passed[n].load(std::memory_order_acquire) == kAll && owner.finished.load(std::memory_order_relaxed) == n)
        owner.finished.store(n + 1, std::memory_order_release);
    }
    work();
    owner.passed[task.number].store(last + 1, std::memory_order_release);
  }
  void end(const OwnedTask& task) { owners_[task.owner]->passed[task.number].store(kAll, std::memory_order_release); }

  // Runs all tasks on all threads: make() gives each thread its pass(task).
  template <typename Make>
  void run(bool fast, const Make& make) {
    on_threads(queues_.tasks(), [&] {
      const FlushDenormals flush(fast);
      try {
        auto pass = make();
        for (OwnedTask task; queues_.take(task);) {
          pass(task);
          end(task);
        }
      } catch (...) {
        abandoned_ = true;
        throw;
      }
    });
  }

 private:
  static constexpr int64_t kAll = std::numeric_limits<int64_t>::max();

  struct Owner {
    std::vector<std::atomic<int64_t>> passed;  // by task: it adds to no key before this one any more
    std::atomic<int64_t> finished{0};          // all tasks before this one have passed all keys
    explicit Owner(int64_t tasks) : passed(tasks) {}
  };

  OwnerQueues queues_;
  std::vector<std::unique_ptr<Owner>> owners_;
  std::atomic<bool> abandoned_{false};
};

}  // namespace streamkl::cpu

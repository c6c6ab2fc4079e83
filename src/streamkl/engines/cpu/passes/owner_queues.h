// The tasks of key owners in a fixed order, and the threads that take them.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

namespace streamkl::cpu {

// A task that a thread has taken: the number of its owner, and its own among the owner's.
struct OwnedTask {
  int64_t owner = -1, number = 0;
};

class OwnerQueues {
 public:
  explicit OwnerQueues(const std::vector<int64_t>& tasks_of_owners) {
    for (const int64_t tasks : tasks_of_owners) {
      queues_.push_back({tasks, 0, 0});
      tasks_ += tasks;
    }
  }

  // Gives a thread the next task of its key owner, or of the one with the fewest threads; false if none is left.
  bool take(OwnedTask& task) {
    const std::lock_guard lock(mutex_);
    const auto left = [](const Queue& queue) { return queue.taken < queue.tasks; };
    if (task.owner < 0 || !left(queues_[task.owner])) {
      if (task.owner >= 0) queues_[task.owner].threads--;
      task.owner = -1;
      for (size_t o = 0; o < queues_.size(); o++)
        if (left(queues_[o]) && (task.owner < 0 || queues_[o].threads < queues_[task.owner].threads)) task.owner = o;
      if (task.owner < 0) return false;
      queues_[task.owner].threads++;
    }
    task.number = queues_[task.owner].taken++;
    return true;
  }

  // Of all owners.
  int64_t tasks() const { return tasks_; }

 private:
  struct Queue {
    int64_t tasks, taken, threads;
  };

  std::vector<Queue> queues_;
  std::mutex mutex_;
  int64_t tasks_ = 0;
};

}  // namespace streamkl::cpu

// Tasks on PyTorch's threads.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/native/CPUBlas.h>

#include <algorithm>
#include <atomic>
#include <thread>

#include <xmmintrin.h>

namespace streamkl::cpu {

// Releases what brgemm keeps in the thread, even after an exception.
struct Release {
  ~Release() { at::native::cpublas::brgemm_release(); }
};

// Runs work() on every thread, but on no more threads than there are tasks.
template <typename Work>
void on_threads(int64_t tasks, const Work& work) {
  const int64_t threads = std::min<int64_t>(at::get_num_threads(), tasks);
  at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    const Release release;
    for (int64_t t = begin; t < end; t++) work();
  });
}

// Runs work(next) on every thread; next() gives a task, or -1 when there are none left.
template <typename Work>
void on_all_threads(int64_t tasks, const Work& work) {
  std::atomic<int64_t> next{0};
  on_threads(tasks, [&] {
    work([&]() -> int64_t {
      const int64_t task = next.fetch_add(1, std::memory_order_relaxed);
      return task < tasks ? task : -1;
    });
  });
}

// Waits until reached() is true, for what another thread does; raises once the work is abandoned.
template <typename Reached>
void wait_until(const std::atomic<bool>& abandoned, const Reached& reached) {
  constexpr int64_t spins = 1 << 10;  // before the thread yields its core
  for (int64_t waited = 0; !reached(); waited++) {
    TORCH_CHECK(!abandoned.load(std::memory_order_relaxed), "streamkl cpu engine: another thread failed");
    waited < spins ? _mm_pause() : std::this_thread::yield();
  }
}

}  // namespace streamkl::cpu

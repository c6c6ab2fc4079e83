/* An allocator hook for LD_PRELOAD: how much of what PyTorch's CPU allocator takes is scratch.

   PyTorch takes its memory by posix_memalign. Sizes named by allocations_exclude() (gradients, row vectors) are counted
   by number, everything else by bytes; both keep their peaks. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

extern void *__libc_memalign(size_t alignment, size_t size);
extern void __libc_free(void *pointer);

enum { SLOTS = 1 << 16, EXCLUDED = 8 };

static struct {
  uintptr_t pointer;
  size_t size;
} slots[SLOTS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int counting;
static long scratch, scratch_peak, allocations;
static size_t excluded[EXCLUDED];
static long held[EXCLUDED], held_peak[EXCLUDED];

static size_t slot_of(uintptr_t pointer) { return (pointer >> 6) * 0x9E3779B97F4A7C15u >> 48; }

static void account(size_t size, int sign) {
  for (int n = 0; n < EXCLUDED; n++) {
    if (excluded[n] == size && size) {
      held[n] += sign;
      if (held[n] > held_peak[n]) held_peak[n] = held[n];
      return;
    }
  }
  scratch += sign * (long)size;
  if (scratch > scratch_peak) scratch_peak = scratch;
}

int posix_memalign(void **out, size_t alignment, size_t size) {
  *out = __libc_memalign(alignment, size);
  if (!*out) return ENOMEM;
  if (!counting) return 0;
  pthread_mutex_lock(&lock);
  size_t n = slot_of((uintptr_t)*out);
  while (slots[n].pointer) n = (n + 1) % SLOTS;
  slots[n].pointer = (uintptr_t)*out;
  slots[n].size = size;
  allocations++;
  account(size, 1);
  pthread_mutex_unlock(&lock);
  return 0;
}

void free(void *pointer) {
  if (pointer && counting) {
    pthread_mutex_lock(&lock);
    size_t n = slot_of((uintptr_t)pointer);
    while (slots[n].pointer && slots[n].pointer != (uintptr_t)pointer) n = (n + 1) % SLOTS;
    if (slots[n].pointer) {
      account(slots[n].size, -1);
      slots[n].pointer = 0;
      for (size_t m = (n + 1) % SLOTS; slots[m].pointer; m = (m + 1) % SLOTS) { /* close the gap */
        size_t home = slot_of(slots[m].pointer);
        if ((m - home) % SLOTS >= (m - n) % SLOTS) {
          slots[n] = slots[m];
          slots[m].pointer = 0;
          n = m;
        }
      }
    }
    pthread_mutex_unlock(&lock);
  }
  __libc_free(pointer);
}

void allocations_exclude(int n, size_t size) { excluded[n] = size; }
void allocations_count(int on) { counting = on; }
long allocations_made(void) { return allocations; }
long allocations_scratch_peak(void) { return scratch_peak; }
long allocations_held_peak(int n) { return held_peak[n]; }

// The thread pool: the caller is thread 0, num_threads - 1 workers join it. Calls come from one
// thread at a time and do not nest. A pool also holds the instruction set its kernels use. A result
// never depends on which thread computes an item; kernels must not read the thread number except to
// find their scratch. Includes no library code (see vec.h for why).
#pragma once

#include <stdint.h>

namespace quire {

struct KernelTable;

class Pool {
  public:
    // Starts the workers. Throws std::runtime_error if a thread cannot be created.
    Pool(int num_threads, const KernelTable& kernels);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    __attribute__((always_inline)) int num_threads() const { return num_threads_; }
    __attribute__((always_inline)) const KernelTable& kernels() const { return kernels_; }

    // Runs body(begin, end, thread) over 0..n in chunks of at most `grain`. Each thread processes
    // one contiguous run from its front; a thread that is done steals chunks from the far end of
    // another's run, and a worker that has not started yet is not waited for. With at most one
    // chunk, or one thread, the caller does all of it. Exceptions of a body are thrown here, after
    // all threads have left.
    template <class Body>
    void deal(int64_t n, int64_t grain, Body&& body) {
        deal_raw(n, grain,
                 [](void* context, int64_t begin, int64_t end, int thread) {
                     (*static_cast<Naked<Body>*>(context))(begin, end, thread);
                 },
                 const_cast<void*>(static_cast<const void*>(&body)));
    }

    // Returns at least `bytes` for `thread` alone, aligned to 64; the content stays until the next
    // call that needs more. Throws std::bad_alloc.
    char* scratch(int thread, int64_t bytes);

    // The same for all threads together: called outside of a deal.
    char* shared(int64_t bytes) { return scratch(num_threads_, bytes); }

    // Returns how often work was distributed beyond the caller.
    int64_t num_forks() const { return num_forks_; }

  private:
    template <class T> struct Strip { using type = T; };
    template <class T> struct Strip<T&> { using type = T; };
    template <class T> using Naked = typename Strip<T>::type;
    using RunBody = void (*)(void* context, int thread);
    using DealBody = void (*)(void* context, int64_t begin, int64_t end, int thread);

    void run_raw(RunBody body, void* context);
    void deal_raw(int64_t n, int64_t grain, DealBody body, void* context);

    struct State;
    int64_t num_forks_ = 0;
    State* state_;
    const KernelTable& kernels_;
    int num_threads_;
};

}  // namespace quire

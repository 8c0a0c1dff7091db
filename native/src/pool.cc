// The thread pool. Workers spin briefly for the next job, then sleep, so that an idle engine costs
// no CPU. Every thread computes with rounding to nearest and denormals kept, whatever the calling
// process has set; an exception on any thread is thrown to the caller once all threads have left
// the job.

#include "quire/pool.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "quire/memory.h"

#if defined(__x86_64__)
#include <immintrin.h>
#else
#include <cfenv>
#endif

namespace quire {

namespace {

constexpr auto kSpin = std::chrono::microseconds(100);
// A worker that has spun in vain stays awake for the time between two steps, but yields to every
// other thread: on a virtual machine a sleeping processor is soon given to another guest.
constexpr auto kStayAwake = std::chrono::milliseconds(2);

inline void pause_cpu() {
#if defined(__x86_64__)
    _mm_pause();
#else
    std::this_thread::yield();
#endif
}

// Sets the floating-point mode while it lives.
class FloatMode {
  public:
#if defined(__x86_64__)
    FloatMode() : saved_(_mm_getcsr()) {
        if ((saved_ & kMode) != kDefault) _mm_setcsr(kDefault);
    }
    ~FloatMode() {
        if ((saved_ & kMode) != kDefault) _mm_setcsr(saved_);
    }

  private:
    static constexpr unsigned kMode = 0xffc0;     // all but the sticky exception flags
    static constexpr unsigned kDefault = 0x1f80;  // to nearest, exceptions masked, denormals kept
    unsigned saved_;
#else
    FloatMode() { std::fegetenv(&saved_), std::fesetenv(FE_DFL_ENV); }
    ~FloatMode() { std::fesetenv(&saved_); }

  private:
    std::fenv_t saved_;
#endif
};

// Polls `ready()` until the time is over, optionally yielding to other threads between polls;
// returns whether it was ready.
template <class Ready>
bool wait_awake(Ready ready, std::chrono::microseconds time, bool gives_way) {
    const auto deadline = std::chrono::steady_clock::now() + time;
    do {
        for (int i = 0; i < 64; ++i) {
            if (ready()) return true;
            pause_cpu();
        }
        if (gives_way) std::this_thread::yield();
    } while (std::chrono::steady_clock::now() < deadline);
    return false;
}

// A run of chunks, first in the upper half and end in the lower half of one word.
struct alignas(64) Run {
    std::atomic<uint64_t> word{0};

    void set(uint32_t first, uint32_t end) {
        word.store(static_cast<uint64_t>(first) << 32 | end, std::memory_order_relaxed);
    }
    int64_t take_front() {
        uint64_t now = word.load(std::memory_order_relaxed);
        for (;;) {
            const uint32_t first = static_cast<uint32_t>(now >> 32);
            const uint32_t end = static_cast<uint32_t>(now);
            if (first >= end) return -1;
            const uint64_t next = static_cast<uint64_t>(first + 1) << 32 | end;
            if (word.compare_exchange_weak(now, next, std::memory_order_relaxed)) return first;
        }
    }
    int64_t take_back() {
        uint64_t now = word.load(std::memory_order_relaxed);
        for (;;) {
            const uint32_t first = static_cast<uint32_t>(now >> 32);
            const uint32_t end = static_cast<uint32_t>(now);
            if (first >= end) return -1;
            const uint64_t next = static_cast<uint64_t>(first) << 32 | (end - 1);
            if (word.compare_exchange_weak(now, next, std::memory_order_relaxed)) return end - 1;
        }
    }
};

}  // namespace

// A job is open from its start until the caller has done all remaining work. A late worker finds it
// closed and is not waited for: a descheduled thread delays a job only while it holds a chunk.
struct Pool::State {
    explicit State(int num_threads) : runs(static_cast<size_t>(num_threads)), scratch(static_cast<size_t>(num_threads) + 1) {}

    // The number of the job in the upper half; kOpen; and how many workers are in it.
    alignas(64) std::atomic<uint64_t> gate{0};
    static constexpr uint64_t kOpen = uint64_t{1} << 31;
    static constexpr uint64_t kNextJob = uint64_t{1} << 32;
    // Written while the gate is closed and empty, read by threads in the job.
    RunBody body = nullptr;
    void* context = nullptr;
    std::atomic<bool> stopping{false};

    std::mutex mutex;
    std::condition_variable job_changed, all_left;
    std::atomic<int> workers_asleep{0};
    std::atomic<bool> caller_asleep{false};

    // The first exception of a worker's body; the caller takes it once the job is closed.
    std::exception_ptr thrown;

    std::vector<Run> runs;
    std::vector<std::thread> workers;
    std::vector<Memory> scratch;  // one a thread, and one they share

    static uint64_t job_of(uint64_t gate) { return gate >> 32; }
    static uint64_t inside(uint64_t gate) { return gate & (kOpen - 1); }

    void open(RunBody new_body, void* new_context) {
        body = new_body;
        context = new_context;
        next_job(kOpen);
    }

    void next_job(uint64_t state) {
        const uint64_t job = job_of(gate.load(std::memory_order_relaxed));
        gate.store((job << 32) + kNextJob + state);
        if (workers_asleep.load() > 0) {
            { std::lock_guard<std::mutex> lock(mutex); }
            job_changed.notify_all();
        }
    }

    void close() {
        if (inside(gate.fetch_and(~kOpen)) == 0) return;
        const auto empty = [this] { return inside(gate.load()) == 0; };
        if (wait_awake(empty, kSpin, false)) return;
        std::unique_lock<std::mutex> lock(mutex);
        caller_asleep.store(true);
        all_left.wait(lock, empty);
        caller_asleep.store(false);
    }

    // Enters the job that is open now; false if there is none.
    bool enter() {
        uint64_t now = gate.load();
        while ((now & kOpen) != 0) {
            if (gate.compare_exchange_weak(now, now + 1)) return true;
        }
        return false;
    }

    void leave() {
        const uint64_t before = gate.fetch_sub(1);
        const bool was_last = inside(before) == 1 && (before & kOpen) == 0;
        if (was_last && caller_asleep.load()) {
            { std::lock_guard<std::mutex> lock(mutex); }
            all_left.notify_one();
        }
    }

    void work(int thread) {
        FloatMode mode;
        uint64_t seen = 0;
        for (;;) {
            const auto changed = [&] { return job_of(gate.load()) != seen; };
            if (!wait_awake(changed, kSpin, false) && !wait_awake(changed, kStayAwake, true)) {
                std::unique_lock<std::mutex> lock(mutex);
                workers_asleep.fetch_add(1);
                job_changed.wait(lock, changed);
                workers_asleep.fetch_sub(1);
            }
            seen = job_of(gate.load());
            if (stopping.load()) return;
            if (!enter()) continue;
            try {
                body(context, thread);
            } catch (...) {
                std::lock_guard<std::mutex> lock(mutex);
                if (!thrown) thrown = std::current_exception();
            }
            leave();
        }
    }

    void stop() {
        stopping.store(true);
        next_job(0);  // there is nothing to enter
        for (std::thread& worker : workers) worker.join();
    }
};

Pool::Pool(int num_threads, const KernelTable& kernels)
    : state_(nullptr), kernels_(kernels), num_threads_(num_threads) {
    if (num_threads < 1 || num_threads > 1024) {
        throw std::runtime_error("num_threads is " + std::to_string(num_threads) +
                                 "; allowed are 1 to 1024");
    }
    state_ = new State(num_threads);
    try {
        for (int thread = 1; thread < num_threads; ++thread) {
            state_->workers.emplace_back([state = state_, thread] { state->work(thread); });
        }
    } catch (const std::system_error& error) {
        const size_t made = state_->workers.size();
        state_->stop();
        delete state_;
        throw std::runtime_error("only " + std::to_string(made + 1) + " of " +
                                 std::to_string(num_threads) + " threads could be started (" +
                                 error.what() + "); lower num_threads");
    }
}

Pool::~Pool() {
    state_->stop();
    delete state_;
}

char* Pool::scratch(int thread, int64_t bytes) {
    Memory& memory = state_->scratch[static_cast<size_t>(thread)];
    if (static_cast<int64_t>(memory.bytes()) < bytes) {
        memory = Memory(static_cast<std::size_t>(bytes));
    }
    return memory.data();
}

void Pool::run_raw(RunBody body, void* context) {
    FloatMode mode;
    state_->open(body, context);
    std::exception_ptr thrown;
    try {
        body(context, 0);
    } catch (...) {
        thrown = std::current_exception();
    }
    state_->close();  // in any case: `context` may be destroyed only when no thread is in the job
    if (!thrown) thrown = state_->thrown;
    state_->thrown = nullptr;
    if (thrown) std::rethrow_exception(thrown);
}

void Pool::deal_raw(int64_t n, int64_t grain, DealBody body, void* context) {
    if (n <= 0) return;
    if (grain < 1) grain = 1;
    if (n / grain > INT32_MAX) grain = n / INT32_MAX + 1;
    const int64_t chunks = (n + grain - 1) / grain;
    if (chunks == 1 || num_threads_ == 1) {
        FloatMode mode;
        return body(context, 0, n, 0);
    }
    ++num_forks_;
    for (int thread = 0; thread < num_threads_; ++thread) {
        state_->runs[static_cast<size_t>(thread)].set(
            static_cast<uint32_t>(chunks * thread / num_threads_),
            static_cast<uint32_t>(chunks * (thread + 1) / num_threads_));
    }
    const auto take_part = [&](int thread) {
        const auto compute = [&](int64_t chunk) {
            const int64_t end = (chunk + 1) * grain;
            body(context, chunk * grain, end < n ? end : n, thread);
        };
        auto& runs = state_->runs;
        for (int64_t chunk; (chunk = runs[static_cast<size_t>(thread)].take_front()) >= 0;) {
            compute(chunk);
        }
        for (int other = 1; other < num_threads_; ++other) {
            Run& victim = runs[static_cast<size_t>((thread + other) % num_threads_)];
            for (int64_t chunk; (chunk = victim.take_back()) >= 0;) compute(chunk);
        }
    };
    run_raw([](void* part, int thread) { (*static_cast<decltype(take_part)*>(part))(thread); },
            const_cast<void*>(static_cast<const void*>(&take_part)));
}

}  // namespace quire

// The beat in memory: one thread that stores the time and sleeps.
// The file is in memory (memfd), so a store waits for no disk. Always holds: the lock is held for a
// store or for nothing else, and the thread sleeps without a deadline while no times are written.

#include "quire/memory_beat.h"

#include <sys/mman.h>

#include <cerrno>
#include <system_error>

namespace quire {

static_assert(std::atomic<int64_t>::is_always_lock_free, "another process reads it");

MemoryBeat::MemoryBeat(int file, double period_s)
    : period_(std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(period_s))) {
    void* mapped = ::mmap(nullptr, sizeof(int64_t), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (mapped == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "beats");
    time_ms_ = static_cast<std::atomic<int64_t>*>(mapped);
    thread_ = std::thread([this] { beats(); });
}

MemoryBeat::~MemoryBeat() {
    {
        std::lock_guard<std::mutex> held(lock_);
        is_over_ = true;
    }
    changed_.notify_all();
    thread_.join();
    ::munmap(static_cast<void*>(time_ms_), sizeof(int64_t));
}

void MemoryBeat::run(bool is_running) {
    {
        std::lock_guard<std::mutex> held(lock_);
        if (is_running == is_running_) return;
        is_running_ = is_running;
        if (is_running) {
            beat();
        } else {
            time_ms_->store(0, std::memory_order_release);
        }
    }
    changed_.notify_all();
}

void MemoryBeat::beats() {
    std::unique_lock<std::mutex> held(lock_);
    while (!is_over_) {
        if (!is_running_) {
            changed_.wait(held, [this] { return is_over_ || is_running_; });
        } else if (!changed_.wait_until(held, Clock::now() + period_,
                                        [this] { return is_over_ || !is_running_; })) {
            beat();
        }
    }
}

void MemoryBeat::beat() {
    const auto now = Clock::now().time_since_epoch();
    const auto now_ms = std::chrono::duration_cast<std::chrono::milliseconds>(now).count();
    time_ms_->store(now_ms, std::memory_order_release);
}

}  // namespace quire

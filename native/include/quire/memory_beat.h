// MemoryBeat: writes the time into a file in memory at regular times, from a thread of its own, for
// another process of this machine that has the file mapped.
// The thread takes no lock but this object's, so a time is old only where the process is stopped or
// the machine is late: neither the interpreter nor a long call of another thread holds it up.
// Always holds: a reader sees whole times only, or 0 while none are written.

#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

namespace quire {

class MemoryBeat {
  public:
    // file: the descriptor of a file of at least eight bytes; it may be closed afterwards. Its
    // first eight bytes are milliseconds of the monotonic clock. Throws std::system_error.
    MemoryBeat(int file, double period_s);
    ~MemoryBeat();

    // Whether times are written; at first they are not. The thread sleeps without a deadline while
    // they are not, and the file has 0.
    void run(bool is_running);
    MemoryBeat(const MemoryBeat&) = delete;
    MemoryBeat& operator=(const MemoryBeat&) = delete;

  private:
    using Clock = std::chrono::steady_clock;

    void beats();
    void beat();

    const Clock::duration period_;
    std::atomic<int64_t>* time_ms_;  // mapped
    std::mutex lock_;
    std::condition_variable changed_;
    bool is_running_ = false, is_over_ = false;
    std::thread thread_;
};

}  // namespace quire

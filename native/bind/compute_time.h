// Time that this process has spent inside computing native calls; the rest of a run is Python's.
// The counter only grows, and concurrent calls of several threads each count, so it may exceed the
// elapsed time.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

inline std::atomic<int64_t> compute_nanoseconds{0};

// Counts while it exists.
class ComputeTime {
  public:
    ComputeTime() = default;
    ~ComputeTime() {
        const auto spent = std::chrono::steady_clock::now() - began_;
        compute_nanoseconds +=
            std::chrono::duration_cast<std::chrono::nanoseconds>(spent).count();
    }
    ComputeTime(const ComputeTime&) = delete;
    ComputeTime& operator=(const ComputeTime&) = delete;

  private:
    std::chrono::steady_clock::time_point began_ = std::chrono::steady_clock::now();
};

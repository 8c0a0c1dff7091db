// Weights that stay in a file and are read again in each step, ahead of their use: for models that
// are larger than memory. Knows ranges of bytes and the order of their use; no weight, no program.
//
// Each range has addresses of its own, so that kernels see one pointer for ever; memory is behind
// them from the time a range is read until it is released. Threads read ahead in the order of the
// ranges, which repeats, as far as the window has room. A range that is acquired out of order is
// read next. Bytes of a range are those of the file: no arithmetic depends on when they came.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace quire {

class WeightStream {
  public:
    struct Range {
        int64_t offset, bytes;  // offset: a multiple of kFilePage
    };
    static constexpr int64_t kFilePage = 4096;

    // descriptor: of the file, duplicated here. is_direct: opened past the page cache; otherwise
    // pages are dropped from it once they were read. window_bytes: memory for ranges that are read
    // ahead and in use. Throws std::invalid_argument for a range that is misplaced or larger than
    // the window, std::bad_alloc, and std::system_error where no thread starts.
    WeightStream(int descriptor, std::vector<Range> ranges, int64_t window_bytes, bool is_direct);
    ~WeightStream();
    WeightStream(const WeightStream&) = delete;
    WeightStream& operator=(const WeightStream&) = delete;

    int64_t num_ranges() const { return static_cast<int64_t>(ranges_.size()); }
    int64_t bytes(int64_t range) const { return at(range).bytes; }
    const char* data(int64_t range) const { return at(range).data; }

    // Waits until a range is there, and keeps it until it is released; may be nested. Returns "",
    // or why it is not there (nothing is to be released then): a read failed, or is_stopped, which
    // is asked from time to time, returned true. A later call reads it again.
    std::string acquire(int64_t range, const std::function<bool()>& is_stopped);
    void release(int64_t range);

    // Bytes read from the file so far, and the nanoseconds that acquire() waited.
    int64_t bytes_read() const { return bytes_read_.load(std::memory_order_relaxed); }
    int64_t waited_ns() const { return waited_ns_.load(std::memory_order_relaxed); }
    // Bytes in memory, or being read.
    int64_t bytes_held() const;

  private:
    enum class State { absent, reading, present, dropping };
    struct Kept {
        int64_t offset, bytes;
        char* data;
        State state = State::absent;
        int64_t users = 0, next_chunk = 0, chunks_left = 0;
    };
    struct Chunk {
        size_t range;
        int64_t start, bytes;
    };

    const Kept& at(int64_t range) const;
    void run();
    void stop();
    bool take_chunk(Chunk* chunk);
    std::string read(const Chunk& chunk) const;
    void finish(const Chunk& chunk, const std::string& error);
    void drop_unused();

    int descriptor_;
    const bool is_direct_;
    const int64_t window_bytes_;
    char* mapped_ = nullptr;
    size_t mapped_bytes_ = 0;
    std::vector<Kept> ranges_;

    mutable std::mutex lock_;
    std::condition_variable to_readers_, to_users_;
    size_t next_ = 0;          // the range to be read after the one being read
    size_t being_read_ = 0;    // its chunks are handed out
    std::deque<size_t> to_drop_;
    int64_t held_bytes_ = 0;
    std::string error_;  // of the last read; nothing is read until an acquire() has seen it
    size_t failed_range_ = 0;  // it was of this one
    bool ends_ = false;
    std::atomic<int64_t> bytes_read_{0}, waited_ns_{0};
    std::vector<std::thread> threads_;
};

}  // namespace quire

// Reading ahead with two threads: while one waits for the disk, the other gets pages for the next
// chunk. The window counts whole ranges, from the first byte that is read to the last that is
// dropped.

#include "quire/weight_stream.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <new>
#include <stdexcept>
#include <system_error>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

namespace quire {

namespace {

constexpr int kThreads = 2;
constexpr int64_t kChunk = int64_t{4} << 20;
constexpr int64_t kHugePage = int64_t{2} << 20;
// Kernels may read this much behind a weight.
constexpr int64_t kSlack = 64;
constexpr std::chrono::milliseconds kStopInterval{50};

int64_t rounded(int64_t bytes, int64_t to) { return (bytes + to - 1) / to * to; }

int64_t mapped_bytes_of(int64_t bytes) {
    return rounded(bytes + kSlack, WeightStream::kFilePage);
}

}  // namespace

WeightStream::WeightStream(int descriptor, std::vector<Range> ranges, int64_t window_bytes,
                           bool is_direct)
    : descriptor_(-1), is_direct_(is_direct), window_bytes_(window_bytes) {
    size_t total = 0;
    for (const Range& range : ranges) {
        if (range.offset < 0 || range.bytes < 1 || range.offset % kFilePage != 0) {
            throw std::invalid_argument("a range of " + std::to_string(range.bytes) +
                                        " bytes at " + std::to_string(range.offset) +
                                        "; ranges start at multiples of " +
                                        std::to_string(kFilePage));
        }
        if (range.bytes > window_bytes) {
            throw std::invalid_argument("a window of " + std::to_string(window_bytes) +
                                        " bytes has no room for a range of " +
                                        std::to_string(range.bytes));
        }
        total += static_cast<size_t>(rounded(mapped_bytes_of(range.bytes), kHugePage));
    }
    mapped_bytes_ = total + kHugePage;
    void* mapped = mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) throw std::bad_alloc();
    mapped_ = static_cast<char*>(mapped);
    const auto address = static_cast<int64_t>(reinterpret_cast<uintptr_t>(mapped_));
    char* next = mapped_ + (rounded(address, kHugePage) - address);
    for (const Range& range : ranges) {
        ranges_.push_back({range.offset, range.bytes, next});
#if defined(MADV_HUGEPAGE)
        // Whole huge pages only: the rest of a last one would be memory beyond the window.
        madvise(next, static_cast<size_t>(range.bytes / kHugePage * kHugePage), MADV_HUGEPAGE);
#endif
        next += rounded(mapped_bytes_of(range.bytes), kHugePage);
    }
    being_read_ = ranges_.size();  // none
    descriptor_ = fcntl(descriptor, F_DUPFD_CLOEXEC, 0);
    if (descriptor_ < 0) {
        munmap(mapped_, mapped_bytes_);
        throw std::system_error(errno, std::generic_category(), "the file of weights");
    }
    try {
        for (int i = 0; i < (ranges_.empty() ? 0 : kThreads); ++i) {
            threads_.emplace_back([this] { run(); });
        }
    } catch (...) {
        stop();
        throw;
    }
}

WeightStream::~WeightStream() { stop(); }

void WeightStream::stop() {
    {
        const std::lock_guard guard(lock_);
        ends_ = true;
    }
    to_readers_.notify_all();
    for (std::thread& thread : threads_) thread.join();
    close(descriptor_);
    munmap(mapped_, mapped_bytes_);
}

const WeightStream::Kept& WeightStream::at(int64_t range) const {
    if (range < 0 || range >= num_ranges()) {
        throw std::out_of_range("range " + std::to_string(range) + " of " +
                                std::to_string(num_ranges()));
    }
    return ranges_[static_cast<size_t>(range)];
}

int64_t WeightStream::bytes_held() const {
    const std::lock_guard guard(lock_);
    return held_bytes_;
}

std::string WeightStream::acquire(int64_t index, const std::function<bool()>& is_stopped) {
    at(index);
    const auto range = static_cast<size_t>(index);
    Kept& kept = ranges_[range];
    std::unique_lock guard(lock_);
    ++kept.users;
    const auto start = std::chrono::steady_clock::now();
    while (kept.state != State::present) {
        std::string failed;
        if (!error_.empty()) {  // of another range: that is read again when it is acquired
            if (failed_range_ == range) failed = error_;
            error_.clear();
            to_readers_.notify_all();
        }
        if (failed.empty() && is_stopped()) failed = "the step was aborted";
        if (!failed.empty()) {
            --kept.users;
            return failed;
        }
        if (kept.state == State::absent) {
            // Nothing that is there comes after it, or the order is another one now.
            if (next_ != range) next_ = range;
            drop_unused();
            to_readers_.notify_all();
        }
        to_users_.wait_for(guard, kStopInterval);
    }
    waited_ns_ += std::chrono::duration_cast<std::chrono::nanoseconds>(
                      std::chrono::steady_clock::now() - start).count();
    return "";
}

void WeightStream::release(int64_t index) {
    at(index);
    const auto range = static_cast<size_t>(index);
    {
        const std::lock_guard guard(lock_);
        Kept& kept = ranges_[range];
        if (--kept.users > 0) return;
        kept.state = State::dropping;
        to_drop_.push_back(range);
    }
    to_readers_.notify_one();
}

// Makes room: drops what is there and not in use.
void WeightStream::drop_unused() {
    for (size_t range = 0; range < ranges_.size(); ++range) {
        Kept& kept = ranges_[range];
        if (kept.state != State::present || kept.users > 0) continue;
        kept.state = State::dropping;
        to_drop_.push_back(range);
    }
}

// Sets the next chunk to be read; false while there is none or no room for its range.
bool WeightStream::take_chunk(Chunk* chunk) {
    if (!error_.empty()) return false;
    if (being_read_ == ranges_.size()) {
        Kept& next = ranges_[next_];
        if (next.state != State::absent || held_bytes_ + next.bytes > window_bytes_) return false;
        next.state = State::reading;
        next.next_chunk = 0;
        next.chunks_left = (next.bytes + kChunk - 1) / kChunk;
        held_bytes_ += next.bytes;
        being_read_ = next_;
        next_ = (next_ + 1) % ranges_.size();
    }
    Kept& range = ranges_[being_read_];
    const int64_t start = range.next_chunk++ * kChunk;
    *chunk = {being_read_, start, std::min(kChunk, range.bytes - start)};
    if (start + kChunk >= range.bytes) being_read_ = ranges_.size();
    return true;
}

std::string WeightStream::read(const Chunk& chunk) const {
    const Kept& range = ranges_[chunk.range];
    // Whole pages, as direct reads ask for; the file may end within the last one.
    const auto wanted = static_cast<size_t>(rounded(chunk.bytes, kFilePage));
    size_t done = 0;
    while (static_cast<int64_t>(done) < chunk.bytes) {
        const off_t from = range.offset + chunk.start + static_cast<off_t>(done);
        const ssize_t count = pread(descriptor_, range.data + chunk.start + done, wanted - done,
                                    from);
        if (count < 0 && errno == EINTR) continue;
        if (count < 0) return std::strerror(errno);
        if (count == 0) return "the file ends at byte " + std::to_string(from);
        done += static_cast<size_t>(count);
    }
#if defined(POSIX_FADV_DONTNEED)
    if (!is_direct_) {
        posix_fadvise(descriptor_, range.offset + chunk.start, chunk.bytes, POSIX_FADV_DONTNEED);
    }
#endif
    return "";
}

void WeightStream::finish(const Chunk& chunk, const std::string& error) {
    Kept& range = ranges_[chunk.range];
    bytes_read_ += chunk.bytes;
    if (!error.empty()) {
        error_ = "weights cannot be read from their file: " + error;
        failed_range_ = chunk.range;
        if (being_read_ == chunk.range) {  // its other chunks are not needed
            const int64_t chunks = (range.bytes + kChunk - 1) / kChunk;
            range.chunks_left -= chunks - range.next_chunk;
            being_read_ = ranges_.size();
        }
        next_ = chunk.range;
        range.next_chunk = -1;  // incomplete
    }
    if (--range.chunks_left > 0) return;
    if (range.next_chunk >= 0) {
        range.state = State::present;
    } else {
        range.state = State::dropping;
        to_drop_.push_back(chunk.range);
    }
}

void WeightStream::run() {
    std::unique_lock guard(lock_);
    while (!ends_) {
        Chunk chunk{};
        if (!to_drop_.empty()) {
            Kept& range = ranges_[to_drop_.front()];
            to_drop_.pop_front();
            guard.unlock();
            madvise(range.data, static_cast<size_t>(mapped_bytes_of(range.bytes)), MADV_DONTNEED);
            guard.lock();
            range.state = State::absent;
            held_bytes_ -= range.bytes;
            to_users_.notify_all();  // one may wait for this range
            to_readers_.notify_one();
        } else if (take_chunk(&chunk)) {
            to_readers_.notify_one();  // there may be another chunk
            guard.unlock();
            const std::string error = read(chunk);
            guard.lock();
            finish(chunk, error);
            to_users_.notify_all();
        } else {
            to_readers_.wait(guard);
        }
    }
}

}  // namespace quire

// Exchange between ranks in shared memory; rank_group.h has the protocol. Numbers that are waited
// for are published with sequential consistency, after the bytes they stand for. A publisher enters
// the system only if another rank sleeps.

#include "quire/rank_group.h"
#include "quire/rank_sockets.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <string>

#if defined(__linux__)
#include <fcntl.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace quire {

namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kLine = 64;
constexpr auto kYield = std::chrono::milliseconds(2);
// A sleep before this process looks around again, and what it counts as at most: where it was
// suspended in between, the other rank is not blamed.
constexpr auto kSleep = std::chrono::milliseconds(50);
constexpr double kSleepCountsS = 0.25;
// An unbounded wait looks this often whether the group was aborted.
constexpr auto kIdleSleep = std::chrono::seconds(2);
// With sockets an abort wakes no wait for a link's number: nothing else of a rank looks.
constexpr auto kIdleSleepBySockets = std::chrono::milliseconds(250);
constexpr auto kUntilAsked = std::chrono::hours(1);
// After so many seconds a rank is asked whether it is there, and it has so many to answer.
constexpr double kAskAfterS = 0.2, kAnswerWithinS = 1.0;
// Rows are copied by several threads from this many bytes on.
constexpr int64_t kCopyGrain = 1 << 16;

int64_t round_up_to(int64_t bytes, int64_t to) { return (bytes + to - 1) / to * to; }

void pause_cpu() {
#if defined(__x86_64__)
    _mm_pause();
#else
    std::this_thread::yield();
#endif
}

// Sleeps while *word is `seen`, for at most `time`; may return early.
void sleep_on(const std::atomic<uint32_t>& word, uint32_t seen, std::chrono::nanoseconds time) {
#if defined(__linux__)
    static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));
    timespec limit{};
    limit.tv_sec = static_cast<time_t>(time.count() / 1'000'000'000);
    limit.tv_nsec = static_cast<long>(time.count() % 1'000'000'000);
    // Not FUTEX_PRIVATE_FLAG: the word is shared by processes.
    syscall(SYS_futex, reinterpret_cast<const uint32_t*>(&word), FUTEX_WAIT, seen, &limit, nullptr,
            0);
#else
    const auto deadline = Clock::now() + time;
    const auto step = std::chrono::microseconds(time > kSleep ? 5000 : 100);
    while (word.load() == seen && Clock::now() < deadline) std::this_thread::sleep_for(step);
#endif
}

void wake_all(const std::atomic<uint32_t>& word) {
#if defined(__linux__)
    syscall(SYS_futex, reinterpret_cast<const uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr,
            nullptr, 0);
#else
    (void)word;
#endif
}

// Whether a thread of this machine is ready to run and has no processor, or waits for a page: it is
// late, as on a machine with too much to do, and not gone. False where the system does not say.
bool is_late(uint32_t thread) {
#if defined(__linux__)
    char stat[512];
    std::snprintf(stat, sizeof stat, "/proc/%u/stat", thread);
    const int file = thread == 0 ? -1 : open(stat, O_RDONLY | O_CLOEXEC);
    if (file < 0) return false;
    const ssize_t bytes = read(file, stat, sizeof stat - 1);
    close(file);
    if (bytes <= 0) return false;
    stat[bytes] = 0;
    const char* name_end = std::strrchr(stat, ')');  // the state follows the name and a space
    return name_end != nullptr && name_end + 2 < stat + bytes &&
           (name_end[2] == 'R' || name_end[2] == 'D');
#else
    (void)thread;
    return false;
#endif
}

// The number of the calling thread, as other processes see it; 0 where there is none.
uint32_t own_thread() {
#if defined(__linux__)
    return static_cast<uint32_t>(syscall(SYS_gettid));
#else
    return 0;
#endif
}

// Numbers wrap around: `value` has reached `number` if it is not before it.
bool reached(uint32_t value, uint32_t number) {
    return static_cast<int32_t>(value - number) >= 0;
}

}  // namespace

struct alignas(64) RankGroup::Header {
    Word aborted;
    Word sent;  // messages of rank 0
    alignas(64) int64_t message_sizes[2];
};

struct alignas(64) RankGroup::RankWords {
    Word ready;  // exchanges for which the rank's part is there
    Word taken;  // messages the rank has taken
    Word asked, answered;
    Word done;  // operations of the rank
    Word answering;  // the system's number of the thread that answers; 0: not known
};

int64_t RankGroup::shared_bytes(int degree, const Sizes& sizes) {
    if (degree < 1 || degree > kMaxDegree) {
        throw std::invalid_argument("degree is " + std::to_string(degree) + "; allowed are 1 to " +
                                    std::to_string(kMaxDegree));
    }
    if (sizes.slot_bytes < 1 || sizes.message_bytes < 1) {
        throw std::invalid_argument("slot_bytes and message_bytes must be above 0");
    }
    return static_cast<int64_t>(sizeof(Header)) +
           degree * static_cast<int64_t>(sizeof(RankWords)) +
           2 * degree * round_up_to(sizes.slot_bytes, kLine) +
           2 * round_up_to(sizes.message_bytes, kLine);
}

RankGroup::RankGroup(char* memory, int64_t bytes, int rank, int degree, const Sizes& sizes,
                     double timeout_s, int members)
    : memory_(memory), bytes_(bytes), rank_(rank), degree_(degree),
      members_(std::max(members > 0 ? members : degree, 1)),
      first_(rank / members_ * members_), sizes_(sizes), timeout_s_(timeout_s) {
    const int64_t needed = shared_bytes(degree, sizes);
    if (bytes < needed) {
        throw std::invalid_argument(std::to_string(bytes) + " bytes of shared memory; " +
                                    std::to_string(needed) + " are needed");
    }
    if (rank < 0 || rank >= degree) {
        throw std::invalid_argument("rank is " + std::to_string(rank) + " of " +
                                    std::to_string(degree));
    }
    if (members < 0 || degree % members_ != 0) {
        throw std::invalid_argument(std::to_string(degree) + " ranks in groups of " +
                                    std::to_string(members));
    }
    if (reinterpret_cast<uintptr_t>(memory) % kLine != 0) {
        throw std::invalid_argument("the shared memory is not aligned to 64 bytes");
    }
    if (!(timeout_s > 0)) throw std::invalid_argument("timeout_s must be above 0");
    // Ranks that share cores only delay each other by spinning.
    spin_us_ = static_cast<int>(std::thread::hardware_concurrency()) >= degree ? 100 : 0;
    answering_ = std::thread([this] { answer(); });
}

RankGroup::~RankGroup() {
    stopping_.store(true);
    words(rank_).asked.value.fetch_add(1);  // so that a sleep that begins now does not last
    wake_all(words(rank_).asked.value);
    if (sockets_) sockets_->close();
    answering_.join();
}

RankGroup::RankWords& RankGroup::words(int rank) const {
    return reinterpret_cast<RankWords*>(memory_ + sizeof(Header))[rank];
}

char* RankGroup::slot(int rank, uint32_t number) const {
    char* slots = memory_ + sizeof(Header) + static_cast<size_t>(degree_) * sizeof(RankWords);
    return slots + (2 * rank + static_cast<int>(number & 1)) * round_up_to(sizes_.slot_bytes, kLine);
}

char* RankGroup::message(uint32_t number) const {
    return slot(degree_, 0) +
           static_cast<int64_t>(number & 1) * round_up_to(sizes_.message_bytes, kLine);
}

void RankGroup::raise(Word& word, uint32_t value) {
    word.value.store(value);
    if (word.sleepers.load() > 0) wake_all(word.value);
}

void RankGroup::publish(Word& word, uint32_t value, int to, std::initializer_list<Part> parts) const {
    raise(word, value);
    if (!sockets_) return;
    const int first = to == kMembers ? first_ : to, end = to == kMembers ? first_ + members_ : to + 1;
    for (int rank = first; rank < end; ++rank) {
        if (!sockets_->has(rank)) continue;
        sockets_->publish(rank, word, value, parts.begin(), static_cast<int>(parts.size()));
    }
}

// The number of this exchange, with the bytes of this rank's slot.
void RankGroup::publish_part(int64_t bytes) const {
    publish(words(rank_).ready, gathers_, kMembers, {{slot(rank_, gathers_), bytes}});
}

void RankGroup::connect(const std::vector<int>& sockets) {
    if (sockets_) throw std::invalid_argument("the ranks are connected already");
    if (static_cast<int>(sockets.size()) != degree_ || sockets[rank_] != -1) {
        throw std::invalid_argument("a socket for each other rank is needed, in the order of ranks");
    }
    sockets_ = std::make_unique<RankSockets>(
        memory_, bytes_, sockets,
        RankSockets::Hooks{
            [this] { abort(); },
            [this] { return words(rank_).done.value.load(std::memory_order_relaxed); },
            [this](int rank, uint32_t done) { words(rank).done.value.store(done); }});
    sockets_->start();
}

void RankGroup::leave() {
    if (sockets_) sockets_->leave();
}

std::string RankGroup::wait_until_over() { return sockets_ ? sockets_->wait_until_over() : ""; }

void RankGroup::lost(int peer, const char* why) const {
    const std::string found = sockets_ ? sockets_->lost() : "";
    throw RankLost(found.empty() ? "rank " + std::to_string(peer) + " " + why : found);
}

bool RankGroup::is_aborted() const {
    return reinterpret_cast<const Header*>(memory_)->aborted.value.load() != 0;
}

void RankGroup::note_progress(int64_t operations) const {
    words(rank_).done.value.fetch_add(static_cast<uint32_t>(operations), std::memory_order_relaxed);
}

int64_t RankGroup::progress() const {
    uint32_t sum = 0;
    for (int rank = 0; rank < degree_; ++rank) sum += words(rank).done.value.load();
    return sum;
}

void RankGroup::abort(const std::string& reason) {
    auto& header = *reinterpret_cast<Header*>(memory_);
    header.aborted.value.store(1);
    wake_all(header.sent.value);
    for (int rank = 0; rank < degree_; ++rank) {
        wake_all(words(rank).ready.value);
        wake_all(words(rank).taken.value);
    }
    if (sockets_) sockets_->abort(reason);
}

// Answers other ranks in a thread of its own, so that a rank that computes for long is not taken
// for one that is suspended. Sleeps until it is asked.
void RankGroup::answer() {
    RankWords& own = words(rank_);
    own.answering.value.store(own_thread());
    while (!stopping_.load()) {
        const uint32_t asked = own.asked.value.load();
        if (own.answered.value.load() != asked) {
            own.answered.value.store(asked);
            continue;
        }
        sleep_on(own.asked.value, asked, kUntilAsked);
    }
}

void RankGroup::wait(const Word& word, uint32_t number, int peer, Wait how) const {
    const bool bounded = how != Wait::idle;
    const auto ready = [&] { return reached(word.value.load(std::memory_order_acquire), number); };
    if (ready()) return;
    const auto began = Clock::now();
    const auto spin = std::chrono::microseconds(spin_us_);
    for (auto now = began; now - began < kYield; now = Clock::now()) {
        for (int i = 0; i < 64; ++i) {
            if (ready()) return;
            pause_cpu();
        }
        if (now - began >= spin) std::this_thread::yield();
    }
    double waited_s = 0, asked_at_s = -1;
    uint32_t question = 0;
    RankWords& other = words(peer);
    const bool is_far = sockets_ && sockets_->has(peer);
    const auto has_answered = [&] {
        return is_far ? sockets_->heard(peer) != question
                      : reached(other.answered.value.load(), question);
    };
    for (;;) {
        if (is_aborted()) lost(peer, "or another one cannot go on");
        const uint32_t seen = word.value.load();
        if (reached(seen, number)) return;
        const auto slept = Clock::now();
        word.sleepers.fetch_add(1);
        if (!reached(word.value.load(), number)) {
            sleep_on(word.value, seen,
                     bounded    ? std::chrono::nanoseconds(kSleep)
                     : sockets_ ? std::chrono::nanoseconds(kIdleSleepBySockets)
                                : std::chrono::nanoseconds(kIdleSleep));
        }
        word.sleepers.fetch_sub(1);
        if (!bounded) continue;
        const std::chrono::duration<double> took = Clock::now() - slept;
        waited_s += std::min(took.count(), kSleepCountsS);
        if (how == Wait::limited && waited_s > timeout_s_) {
            lost(peer, "did not reach the same operation in time");
        }
        if (asked_at_s >= 0 && has_answered()) asked_at_s = -1;
        if (asked_at_s < 0 && waited_s > kAskAfterS) {
            question = is_far ? sockets_->heard(peer) : other.asked.value.fetch_add(1) + 1;
            asked_at_s = waited_s;
            if (is_far) {
                sockets_->ask(peer);
            } else {
                wake_all(other.asked.value);
            }
        }
        if (asked_at_s >= 0 && waited_s - asked_at_s > kAnswerWithinS && !has_answered()) {
            const bool waits = waited_s - asked_at_s < timeout_s_;
            if (is_far || !waits || !is_late(other.answering.value.load())) {
                lost(peer, "does not respond");
            }
        }
    }
}

void RankGroup::check_fits(const Columns& columns) const {
    for (int member = 0; member < members_; ++member) {
        const Share share = share_of(columns.width, columns.unit, member, members_);
        const int64_t bytes = (share.end - share.start) * columns.element_bytes;
        if (bytes > sizes_.slot_bytes) {
            throw std::invalid_argument("a row's part of " + std::to_string(bytes) +
                                        " bytes; slots have " + std::to_string(sizes_.slot_bytes));
        }
    }
}

void RankGroup::all_gather(const Columns& columns, Pool& pool) {
    if (columns.rows == 0) return;
    ++num_gathers_;
    int64_t most = 1;  // bytes of a row's largest part
    for (int member = 0; member < members_; ++member) {
        const Share share = share_of(columns.width, columns.unit, member, members_);
        most = std::max(most, (share.end - share.start) * columns.element_bytes);
    }
    const int64_t at_once = std::max<int64_t>(sizes_.slot_bytes / most, 1);
    // Rows [first, first + count) of a member's columns, to or from its slot.
    const auto copy = [&](int member, int64_t first, int64_t count, bool is_own) {
        const Share share = share_of(columns.width, columns.unit, member, members_);
        const int64_t bytes = (share.end - share.start) * columns.element_bytes;
        char* part = slot(first_ + member, gathers_);
        char* data = columns.data + first * columns.stride_bytes +
                     share.start * columns.element_bytes;
        pool.deal(count, std::max<int64_t>(kCopyGrain / bytes, 1),
                  [&](int64_t begin, int64_t end, int) {
            for (int64_t row = begin; row < end; ++row) {
                char* in_slot = part + row * bytes;
                char* in_rows = data + row * columns.stride_bytes;
                std::memcpy(is_own ? in_slot : in_rows, is_own ? in_rows : in_slot,
                            static_cast<size_t>(bytes));
            }
        });
        if (!is_own) received_bytes_ += count * bytes;
    };
    for (int64_t first = 0; first < columns.rows; first += at_once) {
        const int64_t count = std::min(at_once, columns.rows - first);
        ++gathers_;
        copy(member(), first, count, true);
        const Share own = share_of(columns.width, columns.unit, member(), members_);
        publish_part(count * (own.end - own.start) * columns.element_bytes);
        for (int next = 1; next < members_; ++next) {
            const int other = (member() + next) % members_;
            wait(words(first_ + other).ready, gathers_, first_ + other, Wait::limited);
            copy(other, first, count, false);
        }
    }
}

void RankGroup::all_to_all(const Shares& shares, const int64_t* counts, const int64_t* firsts,
                           Pool& pool) {
    const int64_t row_bytes = shares.width * shares.element_bytes;
    if (row_bytes > sizes_.slot_bytes) {
        throw std::invalid_argument("a row of " + std::to_string(row_bytes) +
                                    " bytes; slots have " + std::to_string(sizes_.slot_bytes));
    }
    ++num_gathers_;
    Share own = shares.received;
    if (own.end == 0) own = share_of(shares.width, shares.unit, member(), members_);
    const int64_t first_byte = own.start * shares.element_bytes;
    const int64_t bytes = (own.end - own.start) * shares.element_bytes;
    const int64_t at_once = sizes_.slot_bytes / row_bytes;
    const int64_t most = *std::max_element(counts, counts + members_);
    const auto copy = [&](char* to, int64_t to_stride, const char* from, int64_t from_stride,
                          int64_t count, int64_t size) {
        if (count == 0) return;
        pool.deal(count, std::max<int64_t>(kCopyGrain / size, 1),
                  [&](int64_t begin, int64_t end, int) {
            for (int64_t row = begin; row < end; ++row) {
                std::memcpy(to + row * to_stride, from + row * from_stride,
                            static_cast<size_t>(size));
            }
        });
    };
    const auto out = [&](int of, int64_t row) {
        return shares.out + (firsts[of] + row) * shares.out_stride_bytes;
    };
    for (int64_t first = 0; first < most; first += at_once) {
        const auto rows_of = [&](int of) {
            return std::clamp<int64_t>(counts[of] - first, 0, at_once);
        };
        const char* rows = shares.own + first * shares.own_stride_bytes;
        ++gathers_;
        copy(slot(rank_, gathers_), row_bytes, rows, shares.own_stride_bytes, rows_of(member()),
             row_bytes);
        publish_part(rows_of(member()) * row_bytes);
        copy(out(member(), first), shares.out_stride_bytes, rows + first_byte,
             shares.own_stride_bytes, rows_of(member()), bytes);
        for (int next = 1; next < members_; ++next) {
            const int other = (member() + next) % members_;
            wait(words(first_ + other).ready, gathers_, first_ + other, Wait::limited);
            copy(out(other, first), shares.out_stride_bytes, slot(first_ + other, gathers_) + first_byte,
                 row_bytes, rows_of(other), bytes);
            received_bytes_ += rows_of(other) * bytes;
        }
    }
}

namespace {

// Columns are added up in blocks that stay in registers or the first cache.
constexpr int64_t kSumColumns = 256;

float widened(float value) { return value; }
float widened(bf16 value) { return widen(value); }
void store(float value, float& to) { to = value; }
void store(float value, bf16& to) { to = round_bf16(value); }

// to[start .. end) = the sum of row_of(rank)[start .. end), in the order of ranks.
template <class T, class RowOf>
void sum_columns(T* to, int64_t start, int64_t end, int degree, RowOf&& row_of) {
    float sums[kSumColumns];
    for (int64_t first = start; first < end; first += kSumColumns) {
        const int64_t count = std::min(kSumColumns, end - first);
        std::fill_n(sums, count, 0.0f);
        for (int rank = 0; rank < degree; ++rank) {
            const T* from = row_of(rank) + first;
            for (int64_t i = 0; i < count; ++i) sums[i] += widened(from[i]);
        }
        for (int64_t i = 0; i < count; ++i) store(sums[i], to[first + i]);
    }
}

}  // namespace

void RankGroup::all_reduce(const Columns& columns, Type type, Pool& pool) {
    if (columns.rows == 0) return;
    const int64_t row_bytes = columns.width * columns.element_bytes;
    if (row_bytes > sizes_.slot_bytes) {
        throw std::invalid_argument("a row of " + std::to_string(row_bytes) +
                                    " bytes; slots have " + std::to_string(sizes_.slot_bytes));
    }
    ++num_gathers_;
    const Share own = share_of(columns.width, columns.unit, member(), members_);
    const int64_t at_once = sizes_.slot_bytes / row_bytes;
    for (int64_t first = 0; first < columns.rows; first += at_once) {
        const int64_t count = std::min(at_once, columns.rows - first);
        char* rows = columns.data + first * columns.stride_bytes;
        ++gathers_;
        pool.deal(count, std::max<int64_t>(kCopyGrain / row_bytes, 1),
                  [&](int64_t begin, int64_t end, int) {
            for (int64_t row = begin; row < end; ++row) {
                std::memcpy(slot(rank_, gathers_) + row * row_bytes,
                            rows + row * columns.stride_bytes, static_cast<size_t>(row_bytes));
            }
        });
        publish_part(count * row_bytes);
        for (int next = 1; next < members_; ++next) {
            const int other = (member() + next) % members_;
            wait(words(first_ + other).ready, gathers_, first_ + other, Wait::limited);
            received_bytes_ += count * (own.end - own.start) * columns.element_bytes;
        }
        pool.deal(count, std::max<int64_t>(kCopyGrain / row_bytes, 1),
                  [&](int64_t begin, int64_t end, int) {
            for (int64_t row = begin; row < end; ++row) {
                char* to = rows + row * columns.stride_bytes;
                const auto part = [&](int of) {
                    return slot(first_ + of, gathers_) + row * row_bytes;
                };
                if (type == Type::f32) {
                    sum_columns(reinterpret_cast<float*>(to), own.start, own.end, members_,
                                [&](int of) { return reinterpret_cast<float*>(part(of)); });
                } else {
                    sum_columns(reinterpret_cast<bf16*>(to), own.start, own.end, members_,
                                [&](int of) { return reinterpret_cast<bf16*>(part(of)); });
                }
            }
        });
    }
    all_gather(columns, pool);
    --num_gathers_;  // counted as one with the sum
}

void RankGroup::all_gather(const char* own, char* out, int64_t bytes) {
    int64_t first = 0;
    do {
        const int64_t count = std::min(sizes_.slot_bytes, bytes - first);
        ++gathers_;
        if (count > 0) {
            std::memcpy(slot(rank_, gathers_), own + first, static_cast<size_t>(count));
        }
        publish_part(count);
        for (int member = 0; member < members_; ++member) {
            const int rank = first_ + member;
            wait(words(rank).ready, gathers_, rank, Wait::limited);
            if (count > 0) {
                std::memcpy(out + member * bytes + first, slot(rank, gathers_),
                            static_cast<size_t>(count));
            }
        }
        first += count;
    } while (first < bytes);
}

void RankGroup::send(const char* bytes, int64_t size) {
    if (rank_ != 0) throw std::invalid_argument("rank 0 sends messages");
    if (size > sizes_.message_bytes) {
        throw std::invalid_argument("a message of " + std::to_string(size) + " bytes; at most " +
                                    std::to_string(sizes_.message_bytes) + " are allowed");
    }
    if (is_aborted()) throw RankLost("a rank cannot go on");
    auto& header = *reinterpret_cast<Header*>(memory_);
    ++messages_;
    for (int rank = 1; rank < members_; ++rank) {
        wait(words(rank).taken, messages_ - 2, rank, Wait::limited);
    }
    std::memcpy(message(messages_), bytes, static_cast<size_t>(size));
    header.message_sizes[messages_ & 1] = size;
    publish(header.sent, messages_, kMembers,
            {{reinterpret_cast<const char*>(&header.message_sizes[messages_ & 1]), sizeof(int64_t)},
             {message(messages_), size}});
}

int64_t RankGroup::receive(const char** bytes) {
    if (rank_ == 0) throw std::invalid_argument("rank 0 sends messages and receives none");
    if (first_ > 0) throw std::invalid_argument("rank 0 sends to ranks of its own group only");
    auto& header = *reinterpret_cast<Header*>(memory_);
    // The message before is given back.
    publish(words(rank_).taken, messages_, 0);
    ++messages_;
    wait(header.sent, messages_, 0, Wait::idle);
    const int64_t size = header.message_sizes[messages_ & 1];
    if (size < 0 || size > sizes_.message_bytes) lost(0, "sent a message of an impossible size");
    *bytes = message(messages_);
    return size;
}

}  // namespace quire

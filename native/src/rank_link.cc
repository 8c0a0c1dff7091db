// Rows and messages from one rank to another; rank_link.h has the protocol. A slot is written
// before its number is published and given back after it was read: RankGroup::publish orders both.
// Waits are those of the group, so that a rank that is gone is found here as in an exchange.

#include "quire/rank_link.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <string>

namespace quire {

namespace {

constexpr int64_t kLine = 64;
constexpr int64_t kRejected = -1;  // the size of a slot that says so
// Rows are copied by several threads from this many bytes on.
constexpr int64_t kCopyGrain = 1 << 16;

int64_t round_up_to(int64_t bytes, int64_t to) { return (bytes + to - 1) / to * to; }

int64_t nanoseconds() {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

}  // namespace

struct alignas(64) RankLink::Header {
    RankGroup::Word sent, taken;
};

struct alignas(64) RankLink::SlotHead {
    int64_t step, bytes, of_bytes;  // of_bytes: of all rows of which these are some
};

int64_t RankLink::shared_bytes(const Sizes& sizes) {
    if (sizes.slot_bytes < 1 || sizes.slots < 1) {
        throw std::invalid_argument("slot_bytes and slots must be above 0");
    }
    const int64_t slot_bytes = round_up_to(sizes.slot_bytes, kLine);
    return static_cast<int64_t>(sizeof(Header)) +
           sizes.slots * (static_cast<int64_t>(sizeof(SlotHead)) + slot_bytes);
}

RankLink::RankLink(std::shared_ptr<RankGroup> group, char* memory, int64_t bytes,
                   const Sizes& sizes, int peer, bool sends)
    : group_(std::move(group)), memory_(memory), sizes_(sizes), peer_(peer), sends_(sends) {
    const int64_t needed = shared_bytes(sizes);
    if (group_ == nullptr) throw std::invalid_argument("a link is between ranks of a group");
    if (bytes < needed) {
        throw std::invalid_argument(std::to_string(bytes) + " bytes of shared memory; " +
                                    std::to_string(needed) + " are needed");
    }
    if (peer < 0 || peer >= group_->degree() || peer == group_->rank()) {
        throw std::invalid_argument("peer is " + std::to_string(peer) + "; rank " +
                                    std::to_string(group_->rank()) + " of " +
                                    std::to_string(group_->degree()) +
                                    " is linked with another one of them");
    }
    if (reinterpret_cast<uintptr_t>(memory) % kLine != 0) {
        throw std::invalid_argument("the shared memory is not aligned to 64 bytes");
    }
}

RankLink::Header& RankLink::header() const { return *reinterpret_cast<Header*>(memory_); }

RankLink::SlotHead& RankLink::head(int64_t number) const {
    return reinterpret_cast<SlotHead*>(memory_ + sizeof(Header))[number % sizes_.slots];
}

char* RankLink::slot(int64_t number) const {
    char* slots = memory_ + sizeof(Header) + static_cast<size_t>(sizes_.slots) * sizeof(SlotHead);
    return slots + (number % sizes_.slots) * round_up_to(sizes_.slot_bytes, kLine);
}

void RankLink::check_end(bool sends) const {
    if (sends == sends_) return;
    throw std::invalid_argument(sends_ ? "this end of the link sends" : "this end receives");
}

void RankLink::check_fits(int64_t row_bytes) const {
    if (row_bytes > sizes_.slot_bytes) {
        throw std::invalid_argument("a row of " + std::to_string(row_bytes) +
                                    " bytes; slots have " + std::to_string(sizes_.slot_bytes));
    }
}

// Takes the next slot for sending: until it is published, number_ + 1.
void RankLink::await_room() {
    const int64_t number = number_ + 1 - sizes_.slots;
    if (number > 0) {
        group_->wait(header().taken, static_cast<uint32_t>(number), peer_,
                     RankGroup::Wait::while_it_responds);
    }
    if (group_->is_aborted()) throw RankLost("a rank cannot go on");
}

// Waits for the next slot of rows, number_ + 1.
void RankLink::await_slot() {
    const int64_t began = nanoseconds();
    group_->wait(header().sent, static_cast<uint32_t>(number_ + 1), peer_,
                 RankGroup::Wait::while_it_responds);
    waited_ns_ += nanoseconds() - began;
}

// Lets the other end have slot number_, with `bytes` bytes.
void RankLink::publish_slot(int64_t bytes) {
    group_->publish(header().sent, static_cast<uint32_t>(number_), peer_,
                    {{reinterpret_cast<const char*>(&head(number_)), sizeof(SlotHead)},
                     {slot(number_), bytes}});
}

void RankLink::send(const Block& block, Pool& pool) {
    check_end(true);
    check_fits(block.row_bytes);
    const int64_t at_once = sizes_.slot_bytes / block.row_bytes;
    for (int64_t first = 0; first < block.rows; first += at_once) {
        const int64_t count = std::min(at_once, block.rows - first);
        await_room();
        ++number_;
        char* to = slot(number_);
        pool.deal(count, std::max<int64_t>(kCopyGrain / block.row_bytes, 1),
                  [&](int64_t begin, int64_t end, int) {
            for (int64_t row = begin; row < end; ++row) {
                std::memcpy(to + row * block.row_bytes,
                            block.data + (first + row) * block.stride_bytes,
                            static_cast<size_t>(block.row_bytes));
            }
        });
        head(number_) = {step_, count * block.row_bytes, block.rows * block.row_bytes};
        publish_slot(count * block.row_bytes);
    }
}

void RankLink::receive(const Block& block, Pool& pool) {
    check_end(false);
    check_fits(block.row_bytes);
    const int64_t at_once = sizes_.slot_bytes / block.row_bytes;
    const auto give_back = [&] {
        group_->publish(header().taken, static_cast<uint32_t>(number_), peer_);
    };
    int64_t first = 0;
    while (first < block.rows) {
        const int64_t count = std::min(at_once, block.rows - first);
        await_slot();
        ++number_;
        const SlotHead sent = head(number_);
        if (sent.step < step_) {
            give_back();
            continue;
        }
        if (sent.step > step_) {
            throw RankLost("rank " + std::to_string(peer_) + " sent rows of step " +
                           std::to_string(sent.step) + " instead of " + std::to_string(step_));
        }
        if (sent.bytes == kRejected) {
            give_back();
            throw std::invalid_argument("rank " + std::to_string(peer_) +
                                        ", which computes the layers before, rejected the step");
        }
        const int64_t all_bytes = block.rows * block.row_bytes;
        if (sent.bytes != count * block.row_bytes || sent.of_bytes != all_bytes) {
            throw RankLost("rank " + std::to_string(peer_) + " sent " +
                           std::to_string(sent.of_bytes) + " bytes of rows instead of " +
                           std::to_string(all_bytes));
        }
        const char* from = slot(number_);
        pool.deal(count, std::max<int64_t>(kCopyGrain / block.row_bytes, 1),
                  [&](int64_t begin, int64_t end, int) {
            for (int64_t row = begin; row < end; ++row) {
                std::memcpy(block.data + (first + row) * block.stride_bytes,
                            from + row * block.row_bytes, static_cast<size_t>(block.row_bytes));
            }
        });
        received_bytes_ += sent.bytes;
        first += count;
        give_back();
    }
}

void RankLink::reject() {
    check_end(true);
    await_room();
    ++number_;
    head(number_) = {step_, kRejected, 0};
    publish_slot(0);
}

void RankLink::send_message(const char* message, int64_t bytes) {
    check_end(true);
    if (bytes > sizes_.slot_bytes) {
        throw std::invalid_argument("a message of " + std::to_string(bytes) +
                                    " bytes; at most " + std::to_string(sizes_.slot_bytes) +
                                    " are allowed");
    }
    await_room();
    ++number_;
    std::memcpy(slot(number_), message, static_cast<size_t>(bytes));
    head(number_) = {step_, bytes, bytes};
    publish_slot(bytes);
}

int64_t RankLink::receive_message(const char** message) {
    check_end(false);
    if (has_message_) group_->publish(header().taken, static_cast<uint32_t>(number_), peer_);
    has_message_ = false;
    group_->wait(header().sent, static_cast<uint32_t>(number_ + 1), peer_, RankGroup::Wait::idle);
    ++number_;
    const int64_t bytes = head(number_).bytes;
    if (bytes < 0 || bytes > sizes_.slot_bytes) {
        throw RankLost("rank " + std::to_string(peer_) + " sent a message of an impossible size");
    }
    has_message_ = true;
    *message = slot(number_);
    return bytes;
}

}  // namespace quire

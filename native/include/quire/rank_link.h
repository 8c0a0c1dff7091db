// From one rank of a group to another, in one direction, through shared memory: rows of a step to
// the next stage of a pipeline, or messages. Moves bytes and computes nothing.
//
// Shared memory: two counters, each alone in a cache line, and a ring of slots. The sender writes
// slot n mod slots and publishes n; the receiver reads it and publishes that it was taken. Neither
// waits for the other while the ring has room, so that a stage goes on with the next step while the
// one after it still computes.
//
// Slots of rows carry the number of their step. A receiver drops what is left of earlier steps,
// which it did not run, so that both ends stay in step whatever one of them rejects.
#pragma once

#include <cstdint>
#include <memory>

#include "quire/pool.h"
#include "quire/rank_group.h"

namespace quire {

class RankLink {
  public:
    struct Sizes {
        int64_t slot_bytes, slots;
    };

    // Bytes of shared memory. Throws std::invalid_argument.
    static int64_t shared_bytes(const Sizes& sizes);

    // memory: at least shared_bytes, zero when the first end opens it, aligned to 64; the caller
    // keeps it alive. peer: the rank of the group at the other end. sends: whether this end sends.
    RankLink(std::shared_ptr<RankGroup> group, char* memory, int64_t bytes, const Sizes& sizes,
             int peer, bool sends);
    RankLink(const RankLink&) = delete;
    RankLink& operator=(const RankLink&) = delete;

    // `rows` rows of row_bytes bytes each, stride_bytes apart.
    struct Block {
        char* data;
        int64_t rows, stride_bytes, row_bytes;
    };

    // Begins step `step`, above the last one. Rows sent or received from now on are its rows.
    void begin(int64_t step) { step_ = step; }
    // Sends rows, or fills them with what the other end sent. Each waits for as long as the other
    // rank responds: its operations before this one may take any time. Throws RankLost, and
    // std::invalid_argument where the other end has rejected the step.
    void send(const Block& block, Pool& pool);
    void receive(const Block& block, Pool& pool);
    // Sender: the step has no rows, since it cannot be computed here.
    void reject();
    // Throws std::invalid_argument unless a row fits a slot.
    void check_fits(int64_t row_bytes) const;

    // Sends bytes that fit a slot. Throws RankLost.
    void send_message(const char* message, int64_t bytes);
    // Waits for the next message, without limit, and returns its size; `message` stays until the
    // next call.
    int64_t receive_message(const char** message);

    // Receiver: bytes of rows so far, and the nanoseconds it waited for them.
    int64_t received_bytes() const { return received_bytes_; }
    int64_t waited_ns() const { return waited_ns_; }

  private:
    struct Header;
    struct SlotHead;

    Header& header() const;
    SlotHead& head(int64_t number) const;
    char* slot(int64_t number) const;
    void check_end(bool sends) const;
    void await_room();
    void await_slot();
    void publish_slot(int64_t bytes);

    std::shared_ptr<RankGroup> group_;
    char* memory_;
    Sizes sizes_;
    int peer_;
    bool sends_;
    int64_t step_ = 0;
    int64_t number_ = 0;  // of slots sent, or received
    bool has_message_ = false;  // the last slot received is still in use
    int64_t received_bytes_ = 0, waited_ns_ = 0;
};

}  // namespace quire

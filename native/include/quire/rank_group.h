// The ranks of one model, and what they exchange through shared memory: columns of
// results (all_gather), each rank's part of results (all_to_all), sums of results (all_reduce), and
// messages from rank 0 to the others. Bytes do not change, other than by all_reduce, which adds in
// the order of ranks.
//
// Shared memory: a header; for each rank its words, each alone in a cache line; two slots per rank
// for its parts; two buffers for messages. A rank writes its part into slot (n mod 2) of exchange n
// and then publishes n. Two slots suffice: a rank publishes n + 1 after it has read all parts of n,
// so a rank that has completed n + 1 may overwrite slot n.
//
// A wait spins, then yields to other threads, then sleeps in the system (a futex), so that it also
// ends soon where ranks share cores. It is bounded: it ends with RankLost if another rank has said
// that it cannot go on, if the rank waited for does not respond (a thread of each rank answers,
// whatever the others compute), or after a time limit. Time in which this process was itself
// suspended counts as little; a rank of this machine that only gets no processor responds late.
#pragma once

#include <atomic>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "quire/pool.h"
#include "quire/types.h"

namespace quire {

// Another rank is gone or does not respond; nothing can be exchanged any more.
struct RankLost : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// The columns [start, end) of `width` that belong to a rank: quire/program/comm_ops.py.
struct Share {
    int64_t start, end;
};
inline Share share_of(int64_t width, int64_t unit, int64_t rank, int64_t degree) {
    const int64_t units = (width + unit - 1) / unit;
    const auto edge = [&](int64_t at) {
        const int64_t column = (units * at + degree - 1) / degree * unit;
        return column < width ? column : width;
    };
    return {edge(rank), edge(rank + 1)};
}

class RankSockets;

class RankGroup {
  public:
    static constexpr int kMaxDegree = 64;
    struct Sizes {
        int64_t slot_bytes, message_bytes;
    };
    // A number that one rank writes and others wait for, alone in a cache line.
    struct alignas(64) Word {
        std::atomic<uint32_t> value;
        mutable std::atomic<uint32_t> sleepers;
    };
    // How long a wait lasts: to the time limit, while the other rank responds, or for ever.
    enum class Wait { limited, while_it_responds, idle };
    // Bytes of the memory that a published number stands for.
    struct Part {
        const char* data;
        int64_t bytes;
    };

    // Bytes of shared memory. Throws std::invalid_argument.
    static int64_t shared_bytes(int degree, const Sizes& sizes);

    // memory: at least shared_bytes, zero when the first rank opens it, aligned to 64; the caller
    // keeps it alive. timeout_s: of a wait for a rank that responds. members: how many ranks gather
    // columns together, from each multiple of it on; 0 for all.
    RankGroup(char* memory, int64_t bytes, int rank, int degree, const Sizes& sizes,
              double timeout_s, int members = 0);
    ~RankGroup();
    // sockets: a connection to each rank that does not share this memory, -1 to the others
    // (rank_sockets.h). Before the first exchange.
    void connect(const std::vector<int>& sockets);
    // Ends by agreement: the end of this process is no loss to the ranks connected.
    void leave();
    // Waits until a rank connected is lost and returns why, or until `leave` with an empty text.
    std::string wait_until_over();
    RankGroup(const RankGroup&) = delete;
    RankGroup& operator=(const RankGroup&) = delete;

    int rank() const { return rank_; }
    int degree() const { return degree_; }
    // How many ranks gather columns with this one, and its place among them.
    int members() const { return members_; }
    int member() const { return rank_ - first_; }
    int64_t slot_bytes() const { return sizes_.slot_bytes; }
    int64_t message_bytes() const { return sizes_.message_bytes; }
    // Exchanges so far, and the bytes received in them.
    int64_t num_gathers() const { return num_gathers_; }
    int64_t received_bytes() const { return received_bytes_; }

    // Fills `rows` rows of `width` columns from `data` on: each rank has its own columns, as
    // share_of gives them. Collective: all members call it with equal sizes. Throws RankLost.
    struct Columns {
        char* data;
        int64_t rows, stride_bytes, width, unit;
        int64_t element_bytes;
    };
    void all_gather(const Columns& columns, Pool& pool);
    // Throws std::invalid_argument unless a row's largest part fits a slot.
    void check_fits(const Columns& columns) const;

    // Sums what the ranks have in all of these columns, in the order of ranks in f32, rounded once:
    // each rank its own columns, which all_gather then exchanges. Collective. Throws RankLost.
    void all_reduce(const Columns& columns, Type type, Pool& pool);

    // Each rank has counts[rank] rows of all columns, `own`, and receives its own columns of every
    // rank's rows: those of a rank go to the rows firsts[rank] of `out` on. received: these
    // columns, where they are not share_of over all members. Collective. Throws RankLost.
    struct Shares {
        const char* own;
        int64_t own_stride_bytes;
        char* out;
        int64_t out_stride_bytes, width, unit;
        int64_t element_bytes;
        Share received{0, 0};
    };
    void all_to_all(const Shares& shares, const int64_t* counts, const int64_t* firsts,
                    Pool& pool);

    // Gathers `bytes` bytes of each member, in their order. Collective.
    void all_gather(const char* own, char* out, int64_t bytes);
    void barrier() { all_gather(nullptr, nullptr, 0); }

    // Rank 0: sends a message to its other members; waits until they have taken the one before the
    // last.
    void send(const char* message, int64_t bytes);
    // The others: waits for the next message, without limit, and returns its size; `message` stays
    // until the next call.
    int64_t receive(const char** message);

    // Any thread: lets all ranks' waits end with RankLost.
    void abort(const std::string& reason = "");
    bool is_aborted() const;
    // Bytes of the memory, links between ranks included.
    int64_t bytes() const { return bytes_; }

    // For what ranks exchange in other ways (rank_link.h): publishes a number that stands for the
    // bytes of up to two parts, to one rank or to all members, and waits until one has reached
    // `number`. Throws RankLost.
    static constexpr int kMembers = -1;
    void publish(Word& word, uint32_t value, int to, std::initializer_list<Part> parts = {}) const;
    void wait(const Word& word, uint32_t number, int peer, Wait how) const;
    // Stores a number and wakes what waits for it in this memory.
    static void raise(Word& word, uint32_t value);
    // Counts operations done by this rank; their sum over all ranks, modulo 2^32. Any thread.
    void note_progress(int64_t operations) const;
    int64_t progress() const;

  private:
    struct Header;
    struct RankWords;

    RankWords& words(int rank) const;
    char* slot(int rank, uint32_t number) const;
    char* message(uint32_t number) const;
    void publish_part(int64_t bytes) const;
    void answer();
    [[noreturn]] void lost(int peer, const char* why) const;

    char* memory_;
    int64_t bytes_;
    int rank_, degree_, members_, first_;
    Sizes sizes_;
    double timeout_s_;
    uint32_t gathers_ = 0, messages_ = 0;
    int64_t num_gathers_ = 0, received_bytes_ = 0;
    int64_t spin_us_;
    std::atomic<bool> stopping_{false};
    std::thread answering_;
    std::unique_ptr<RankSockets> sockets_;  // to ranks that do not share the memory
};

}  // namespace quire

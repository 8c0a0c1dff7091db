// Connections to the ranks that do not share this rank's memory. Each of them has a segment of its
// own, laid out alike (rank_group.h). What a rank publishes it writes into the segments of those
// that read it, at the same place: the bytes first, then the number that is waited for. So the
// protocols of rank_group.h and rank_link.h hold unchanged between machines.
//
// A thread for each connection takes what arrives and never waits for anything else, so that no
// two ranks can wait for each other's buffers. A frame is a header of fixed size and up to two
// ranges of bytes; offsets and sizes of both are checked against the segment. The connections are
// opened and authenticated by quire/comm/rendezvous.py.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "quire/rank_group.h"

namespace quire {

class RankSockets {
  public:
    // What the connections need of the group. on_lost: let the waits of this process end; done: the
    // operations of this rank; note_done: those of another one.
    struct Hooks {
        std::function<void()> on_lost;
        std::function<uint32_t()> done;
        std::function<void(int, uint32_t)> note_done;
    };

    // memory: the segment. sockets: a connected socket for each rank, -1 where there is none; they
    // are closed here.
    RankSockets(char* memory, int64_t bytes, const std::vector<int>& sockets, Hooks hooks);
    ~RankSockets();
    RankSockets(const RankSockets&) = delete;
    RankSockets& operator=(const RankSockets&) = delete;

    // Starts taking what arrives.
    void start();
    bool has(int rank) const {
        return rank < static_cast<int>(peers_.size()) && peers_[rank] != nullptr;
    }
    // Writes `parts`, which lie in the segment, and then a number into the segment of `peer`.
    // Throws RankLost.
    void publish(int peer, const RankGroup::Word& word, uint32_t value,
                 const RankGroup::Part* parts, int num_parts);
    // Asks a rank for a sign of life; `heard` changes with everything that arrives from it.
    void ask(int peer);
    uint32_t heard(int peer) const;
    // Lets the others' waits end. reason: why this rank fails; empty: another one has failed.
    void abort(const std::string& reason);
    // Says that this rank ends by agreement, so that its end is no loss.
    void leave();
    // Closes the connections and ends their threads. Once.
    void close();
    // Why a rank is lost; empty while none is. Waits for that, or for `leave`.
    std::string lost() const;
    std::string wait_until_over();

  private:
    struct Frame;
    struct Peer;

    void take(Peer& peer);
    bool take_frame(Peer& peer, const Frame& frame);
    bool read(Peer& peer, char* to, int64_t bytes);
    void write(Peer& peer, const Frame& frame, const RankGroup::Part* parts, int num_parts);
    std::string write_frame(Peer& peer, const Frame& frame, const RankGroup::Part* parts,
                            int num_parts);
    void post(Peer& peer);
    void lose(Peer& peer, const std::string& why, bool is_vague = false);
    Frame frame_of(uint32_t kind) const;
    bool is_inside(int64_t offset, int64_t bytes) const;

    char* memory_;
    int64_t bytes_;
    Hooks hooks_;
    std::vector<std::unique_ptr<Peer>> peers_;
    std::atomic<bool> is_over_{false}, is_aborted_{false};
    mutable std::mutex lock_;
    std::condition_variable over_;
    std::string lost_, reason_;
    bool is_vague_ = false;
};

}  // namespace quire

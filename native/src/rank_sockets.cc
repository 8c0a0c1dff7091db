// Frames between ranks; rank_sockets.h has the protocol. A writer holds its connection's lock for
// one frame. Answers to questions are written by the thread that takes frames only if that can be
// done at once, and by the next writer otherwise.

#include "quire/rank_sockets.h"
#include "quire/socket_flags.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>

namespace quire {

namespace {

constexpr int64_t kLine = 64;
// A writer looks this often whether it is over, and gives up after as many times without progress.
constexpr int kPollMs = 50, kPolls = 30;
// What arrives is counted in pieces, so that a large frame on a slow network is a sign of life.
constexpr int64_t kReadBytes = 1 << 18;
constexpr auto kBetterReason = std::chrono::milliseconds(200);
constexpr int64_t kMaxReason = 1024;  // bytes of what a rank says of its failure
constexpr char kClosed[] =
    "has closed its connection: its process has ended, or its network is gone";

enum Kind : uint32_t { kPublish = 1, kAsk, kAnswer, kAbort, kBye };

}  // namespace

// In the byte order of this machine: programs and weights are those of one, too.
struct RankSockets::Frame {
    uint32_t kind, value, done, reserved;
    int64_t word;
    int64_t offsets[2], sizes[2];
};

struct RankSockets::Peer {
    int rank, socket;
    std::thread taking;
    std::mutex writing;
    std::atomic<bool> owes_answer{false}, owes_abort{false};
    std::atomic<bool> is_broken{false}, has_left{false};
    std::atomic<uint32_t> heard{0};
};

RankSockets::RankSockets(char* memory, int64_t bytes, const std::vector<int>& sockets, Hooks hooks)
    : memory_(memory), bytes_(bytes), hooks_(std::move(hooks)) {
    for (size_t rank = 0; rank < sockets.size(); ++rank) {
        peers_.emplace_back();
        if (sockets[rank] < 0) continue;
        peers_.back() = std::make_unique<Peer>();
        peers_.back()->rank = static_cast<int>(rank);
        peers_.back()->socket = sockets[rank];
    }
}

void RankSockets::start() {
    for (auto& peer : peers_) {
        if (peer) peer->taking = std::thread([this, one = peer.get()] { take(*one); });
    }
}

RankSockets::~RankSockets() = default;

void RankSockets::close() {
    {
        std::lock_guard<std::mutex> held(lock_);
        is_over_.store(true);
    }
    over_.notify_all();
    for (auto& peer : peers_) {
        if (peer) shutdown(peer->socket, SHUT_RDWR);
    }
    for (auto& peer : peers_) {
        if (!peer) continue;
        peer->taking.join();
        ::close(peer->socket);
    }
}

RankSockets::Frame RankSockets::frame_of(uint32_t kind) const {
    Frame frame{};
    frame.kind = kind;
    frame.done = hooks_.done();
    return frame;
}

bool RankSockets::is_inside(int64_t offset, int64_t bytes) const {
    return offset >= 0 && bytes >= 0 && bytes <= bytes_ && offset <= bytes_ - bytes;
}

void RankSockets::publish(int peer, const RankGroup::Word& word, uint32_t value,
                          const RankGroup::Part* parts, int num_parts) {
    Frame frame = frame_of(kPublish);
    frame.value = value;
    frame.word = reinterpret_cast<const char*>(&word) - memory_;
    for (int part = 0; part < num_parts; ++part) {
        frame.offsets[part] = parts[part].data - memory_;
        frame.sizes[part] = parts[part].bytes;
    }
    write(*peers_[peer], frame, parts, num_parts);
    post(*peers_[peer]);
}

void RankSockets::write(Peer& peer, const Frame& frame, const RankGroup::Part* parts,
                        int num_parts) {
    const std::string why = write_frame(peer, frame, parts, num_parts);
    if (why.empty()) return;
    lose(peer, why);
    shutdown(peer.socket, SHUT_RDWR);  // a part of the frame may be on its way
    throw RankLost(lost());
}

// Returns why the frame cannot be written, and lets nothing follow it then.
std::string RankSockets::write_frame(Peer& peer, const Frame& frame, const RankGroup::Part* parts,
                                     int num_parts) {
    std::lock_guard<std::mutex> held(peer.writing);
    iovec vectors[3] = {{const_cast<Frame*>(&frame), sizeof(Frame)}, {}, {}};
    for (int part = 0; part < num_parts; ++part) {
        vectors[1 + part] = {const_cast<char*>(parts[part].data),
                             static_cast<size_t>(parts[part].bytes)};
    }
    msghdr message{};
    message.msg_iov = vectors;
    message.msg_iovlen = static_cast<size_t>(1 + num_parts);
    size_t left = sizeof(Frame);
    for (int part = 0; part < num_parts; ++part) left += static_cast<size_t>(parts[part].bytes);
    const auto fail = [&](const std::string& why) {
        peer.is_broken.store(true);
        return why;
    };
    int polls = 0;
    while (left > 0) {
        if (peer.is_broken.load()) return "cannot be sent to any more";
        const ssize_t sent = sendmsg(peer.socket, &message, kSendFlags);
        if (sent < 0 && errno == EINTR) continue;
        if (sent < 0 && errno != EAGAIN && errno != EWOULDBLOCK) {
            const bool is_closed = errno == EPIPE || errno == ECONNRESET;
            return fail(is_closed ? kClosed
                                  : std::string("cannot be sent to: ") + std::strerror(errno));
        }
        if (sent < 0) {
            if (++polls > kPolls) return fail("does not take what it is sent");
            if (is_aborted_.load()) return fail("or another one cannot go on");
            pollfd room{peer.socket, POLLOUT, 0};
            poll(&room, 1, kPollMs);
            continue;
        }
        polls = 0;
        left -= static_cast<size_t>(sent);
        auto skip = static_cast<size_t>(sent);
        while (skip > 0) {  // what is left of the vectors
            const size_t taken = std::min(skip, message.msg_iov->iov_len);
            message.msg_iov->iov_base = static_cast<char*>(message.msg_iov->iov_base) + taken;
            message.msg_iov->iov_len -= taken;
            skip -= taken;
            if (message.msg_iov->iov_len == 0 && message.msg_iovlen > 1) {
                ++message.msg_iov;
                --message.msg_iovlen;
            }
        }
    }
    return "";
}

// Writes the small frames that are owed, if the connection is free and takes them at once.
void RankSockets::post(Peer& peer) {
    while (peer.owes_answer.load() || peer.owes_abort.load()) {
        std::unique_lock<std::mutex> held(peer.writing, std::try_to_lock);
        if (!held.owns_lock() || peer.is_broken.load()) return;  // its writer comes here after it
        pollfd room{peer.socket, POLLOUT, 0};
        if (poll(&room, 1, 0) != 1 || (room.revents & POLLOUT) == 0) return;
        const bool aborts = peer.owes_abort.load();
        (aborts ? peer.owes_abort : peer.owes_answer).store(false);
        Frame frame = frame_of(aborts ? kAbort : kAnswer);
        std::string reason;
        if (aborts) {
            std::lock_guard<std::mutex> read(lock_);
            reason = reason_;
        }
        frame.sizes[0] = static_cast<int64_t>(reason.size());
        const std::string bytes =
            std::string(reinterpret_cast<const char*>(&frame), sizeof(frame)) + reason;
        if (send(peer.socket, bytes.data(), bytes.size(), kSendFlags) !=
            static_cast<ssize_t>(bytes.size())) {
            peer.is_broken.store(true);
            shutdown(peer.socket, SHUT_RDWR);
            return;
        }
    }
}

void RankSockets::ask(int peer) {
    if (peers_[peer]->is_broken.load()) return;
    write(*peers_[peer], frame_of(kAsk), nullptr, 0);
    post(*peers_[peer]);
}

uint32_t RankSockets::heard(int peer) const { return peers_[peer]->heard.load(); }

void RankSockets::abort(const std::string& reason) {
    {
        std::lock_guard<std::mutex> held(lock_);
        if (!is_aborted_.load()) reason_ = reason.substr(0, kMaxReason);
    }
    is_aborted_.store(true);
    for (auto& peer : peers_) {
        if (!peer) continue;
        peer->owes_abort.store(true);
        post(*peer);
    }
}

void RankSockets::leave() {
    {
        std::lock_guard<std::mutex> held(lock_);
        is_over_.store(true);  // what fails from now on is no loss
    }
    over_.notify_all();
    for (auto& peer : peers_) {
        if (!peer || peer->is_broken.load()) continue;
        try {
            write(*peer, frame_of(kBye), nullptr, 0);
        } catch (const RankLost&) {  // it has left already
        }
    }
}

std::string RankSockets::lost() const {
    std::lock_guard<std::mutex> held(lock_);
    return lost_;
}

std::string RankSockets::wait_until_over() {
    std::unique_lock<std::mutex> held(lock_);
    over_.wait(held, [&] { return is_over_.load() || !lost_.empty(); });
    // A rank that has found the reason says only that it cannot go on: ours follows soon.
    over_.wait_for(held, kBetterReason, [&] { return is_over_.load() || !is_vague_; });
    return lost_;
}

// The first reason counts, unless it only says that some rank has found one.
void RankSockets::lose(Peer& peer, const std::string& why, bool is_vague) {
    bool is_first = false;
    {
        std::lock_guard<std::mutex> held(lock_);
        if (is_over_.load() || (!lost_.empty() && (is_vague || !is_vague_))) return;
        is_first = lost_.empty();
        is_vague_ = is_vague;
        lost_ = "rank " + std::to_string(peer.rank) + " " + why;
    }
    over_.notify_all();
    if (is_first) hooks_.on_lost();
}

bool RankSockets::read(Peer& peer, char* to, int64_t bytes) {
    while (bytes > 0) {
        const auto most = static_cast<size_t>(std::min(bytes, kReadBytes));
        const ssize_t got = recv(peer.socket, to, most, 0);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return false;
        peer.heard.fetch_add(1);
        to += got;
        bytes -= got;
    }
    return true;
}

// The thread of a connection: until the other end leaves, or is lost.
void RankSockets::take(Peer& peer) {
    for (;;) {
        Frame frame;
        if (!read(peer, reinterpret_cast<char*>(&frame), sizeof(frame))) break;
        hooks_.note_done(peer.rank, frame.done);
        if (!take_frame(peer, frame)) break;
    }
    if (!peer.has_left.load()) {
        lose(peer, kClosed);
    }
}

// Returns whether frames may follow.
bool RankSockets::take_frame(Peer& peer, const Frame& frame) {
    switch (frame.kind) {
        case kPublish: {
            bool is_right = frame.word % kLine == 0 &&
                            is_inside(frame.word, static_cast<int64_t>(sizeof(RankGroup::Word)));
            for (int part = 0; part < 2; ++part) {
                is_right = is_right && is_inside(frame.offsets[part], frame.sizes[part]);
            }
            if (!is_right) {
                lose(peer, "has sent bytes for a place outside the memory of ranks");
                return false;
            }
            for (int part = 0; part < 2; ++part) {
                if (!read(peer, memory_ + frame.offsets[part], frame.sizes[part])) return false;
            }
            RankGroup::raise(*reinterpret_cast<RankGroup::Word*>(memory_ + frame.word),
                             frame.value);
            return true;
        }
        case kAsk:
            peer.owes_answer.store(true);
            post(peer);
            return true;
        case kAnswer:
            return true;
        case kAbort: {
            if (frame.sizes[0] < 0 || frame.sizes[0] > kMaxReason) {
                lose(peer, "has sent a reason of an impossible size");
                return false;
            }
            std::string reason(static_cast<size_t>(frame.sizes[0]), '\0');
            if (!read(peer, reason.data(), frame.sizes[0])) return false;
            const bool is_vague = reason.empty();
            lose(peer, is_vague ? "or another one cannot go on" : "cannot go on: " + reason,
                 is_vague);
            return true;
        }
        case kBye:
            peer.has_left.store(true);
            if (peer.rank == 0) {  // no rank goes on without it
                std::lock_guard<std::mutex> held(lock_);
                if (lost_.empty()) lost_ = "rank 0 has ended";
                over_.notify_all();
            }
            return false;
        default:
            lose(peer, "has sent a frame of an unknown kind: its version is another one");
            return false;
    }
}

}  // namespace quire

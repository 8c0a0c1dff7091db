// The writer of beats: one thread, which sleeps without a deadline while there is no socket.
// A message is missed where a socket has no room for it; one that took only a part is shut down, so
// that its other user ends the connection.

#include "quire/beat_writer.h"
#include "quire/socket_flags.h"

#include <sys/socket.h>

#include <cerrno>
#include <utility>

namespace quire {

BeatWriter::BeatWriter(double period_s, std::string message)
    : period_(std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(period_s))),
      message_(std::move(message)) {}

BeatWriter::~BeatWriter() {
    {
        std::lock_guard<std::mutex> held(lock_);
        is_over_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
}

void BeatWriter::add(int socket) {
    {
        std::lock_guard<std::mutex> held(lock_);
        if (!thread_.joinable()) thread_ = std::thread([this] { run(); });  // may throw
        sockets_.insert(socket);
    }
    changed_.notify_all();
}

void BeatWriter::remove(int socket) {
    std::lock_guard<std::mutex> held(lock_);
    sockets_.erase(socket);
}

void BeatWriter::write(int socket, const char* piece, int64_t size) {
    std::lock_guard<std::mutex> held(lock_);
    if (sockets_.count(socket) && !sends(socket, piece, size, false)) sockets_.erase(socket);
}

int64_t BeatWriter::size() const {
    std::lock_guard<std::mutex> held(lock_);
    return static_cast<int64_t>(sockets_.size());
}

void BeatWriter::run() {
    std::unique_lock<std::mutex> held(lock_);
    while (!is_over_) {
        if (sockets_.empty()) {
            changed_.wait(held, [this] { return is_over_ || !sockets_.empty(); });
        }
        const auto next = Clock::now() + period_;
        if (changed_.wait_until(held, next, [this] { return is_over_; })) return;
        for (auto at = sockets_.begin(); at != sockets_.end();) {
            const auto size = static_cast<int64_t>(message_.size());
            at = sends(*at, message_.data(), size, true) ? std::next(at) : sockets_.erase(at);
        }
    }
}

// Returns whether the socket can be written to again. may_skip: the piece may be missed whole.
bool BeatWriter::sends(int socket, const char* piece, int64_t size, bool may_skip) {
    ssize_t sent = 0;
    do {
        sent = ::send(socket, piece, static_cast<size_t>(size), kSendFlags);
    } while (sent < 0 && errno == EINTR);
    if (sent == size) return true;
    if (sent < 0 && may_skip && (errno == EAGAIN || errno == EWOULDBLOCK)) return true;
    ::shutdown(socket, SHUT_RDWR);  // its other user notices, and ends the connection
    return false;
}

}  // namespace quire

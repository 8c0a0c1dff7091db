// BeatWriter: writes one short message to each of some sockets at regular times, from a thread of
// its own. The thread takes no lock but this object's, so it is late only where the machine is:
// neither the interpreter nor a long call of another thread holds it up. Knows no HTTP.
// Always holds: no write waits; a reader that does not keep up misses messages; a socket that took
// only a part of one is shut down.

#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <set>
#include <string>
#include <thread>

namespace quire {

class BeatWriter {
  public:
    // message: what is written each period.
    BeatWriter(double period_s, std::string message);
    ~BeatWriter();
    BeatWriter(const BeatWriter&) = delete;
    BeatWriter& operator=(const BeatWriter&) = delete;

    // Writes to a socket from now on, until `remove`. The caller keeps it open until then.
    void add(int socket);
    void remove(int socket);
    // Writes between two messages, or not at all where the socket was shut down.
    void write(int socket, const char* piece, int64_t size);
    // Sockets that are written to.
    int64_t size() const;

  private:
    using Clock = std::chrono::steady_clock;

    void run();
    bool sends(int socket, const char* piece, int64_t size, bool may_skip);

    const Clock::duration period_;
    const std::string message_;
    mutable std::mutex lock_;
    std::condition_variable changed_;
    std::set<int> sockets_;
    bool is_over_ = false;
    std::thread thread_;  // started with the first socket
};

}  // namespace quire

// Flags of sends that neither wait nor raise SIGPIPE where the other end has closed.
// Not all systems have the latter as a flag; Python ignores the signal there.
// Knows no protocol.

#pragma once

#include <sys/socket.h>

namespace quire {

#if defined(MSG_NOSIGNAL)
constexpr int kSendFlags = MSG_NOSIGNAL | MSG_DONTWAIT;
#else
constexpr int kSendFlags = MSG_DONTWAIT;
#endif

}  // namespace quire

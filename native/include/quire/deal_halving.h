// Distribute panels of weights that stream from memory: long runs first, short ones last.
// Each panel is passed to the body once. Only for files compiled once per instruction set.
// The computation itself is the caller's.
#pragma once

#include "quire/pool.h"

namespace quire {

constexpr int64_t kLeastUnitBytes = 1 << 16;  // of weights
constexpr int kMostUnits = 6;                 // of a thread

// body(first panel, end, thread) over all panels: each thread's share in units of a half of it, a
// quarter and so on. The largest come first, so that reading is not interrupted, and the runs that
// others steal from the far end are small. Taking a unit waits until all non-temporal stores have
// completed.
template <class Body>
static inline __attribute__((always_inline)) void deal_halving(Pool& pool, int64_t panels,
                                                               int64_t panel_bytes,
                                                               const Body& body) {
    const int64_t threads = pool.num_threads(), of_one = panels / threads;
    if (of_one * panel_bytes < kLeastUnitBytes) return pool.deal(panels, panels, body);
    int units = 1;
    while (units < kMostUnits && (of_one >> units) * panel_bytes >= kLeastUnitBytes) ++units;
    const auto start = [=](int64_t index) {
        if (index == threads * units) return panels;
        const int64_t thread = index / units, first = panels * thread / threads;
        const int64_t share = panels * (thread + 1) / threads - first;
        return first + share - (share >> index % units);
    };
    pool.deal(threads * units, 1, [&](int64_t begin, int64_t end, int thread) {
        body(start(begin), start(end), thread);
    });
}

}  // namespace quire

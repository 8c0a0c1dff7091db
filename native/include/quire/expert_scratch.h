// Rows of the scratch memory of experts, and how many pairs of a row and an expert are computed
// together: shared by experts.cc and expert_parallel.cc.
// Always holds: rows begin at multiples of 64 bytes.
#pragma once

#include <algorithm>
#include <cstdint>

#include "quire/experts.h"

namespace quire {

// Pairs computed together: enough that the products of many rows are bound by arithmetic.
constexpr int64_t kBatchPairs = 1024;

inline int64_t batch_pairs(const ExpertShape& shape) {
    return std::min(shape.rows * shape.top_k, kBatchPairs);
}

// Bytes of a row of scratch memory.
inline int64_t line(int64_t width, Type type) { return round_up(width * type_bytes(type), 64); }

// Rows of `bytes` bytes each from `data`.
inline Rows rows_at(char* data, int64_t bytes, Type type, int64_t width) {
    return {data, bytes / type_bytes(type), type, width};
}

}  // namespace quire

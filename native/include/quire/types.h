// Scalar types and dtype tags shared by all native code. Includes no library code, so files
// compiled once per instruction set may use it. Rounding to bf16 here gives the bits of
// quire/weights/dtypes.py on every instruction set.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace quire {

// Storage of a bfloat16: the upper half of an f32.
struct bf16 {
    uint16_t bits;
};

enum class Type : int32_t { f32 = 0, bf16 = 1 };

static inline int64_t type_bytes(Type type) { return type == Type::f32 ? 4 : 2; }

static inline int64_t round_up(int64_t value, int64_t multiple) {
    return (value + multiple - 1) / multiple * multiple;
}

// The f32 of a bf16, exact.
static inline float widen(bf16 value) {
    const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
    float result;
    __builtin_memcpy(&result, &bits, 4);
    return result;
}

// The nearest bf16, ties to even; a NaN stays a (quiet) NaN.
static inline bf16 round_bf16(float value) {
    uint32_t bits;
    __builtin_memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        return {static_cast<uint16_t>((bits >> 16) | 0x40u)};
    }
    return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

}  // namespace quire

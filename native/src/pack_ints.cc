// pack_ints: quantize 32 rows of a weight, transposed so that lanes are rows, into a panel.
//
// Multiplications and additions only, never fused: the same bytes on every instruction set. Lanes
// are independent, so a row's bytes do not depend on its neighbours. The definition is
// quire/quant/int_weights.py. Only lanes low .. high of the panel are written, elements past K
// count as zero, and non-finite rows or groups get the scale NaN.

#include "quire/int_vec.h"
#include "quire/int_steps.h"
#include "quire/kernels.h"

namespace quire::QUIRE_ISA_NS {

namespace {

constexpr int kVecs = static_cast<int>(kIntLanes) / kLanes;
constexpr float kTiny = 0x1p-100f;
constexpr int32_t kInfinity = 0x7f800000;
constexpr int32_t kHuge = 0x5d800000;  // 2^60: errors are squared
constexpr int kClips = 12;  // ratios tried: the largest magnitude becomes -7 - 0.3125 i steps
// the share of a group's squares that remains if 4 bits represent it
constexpr float kHeld = 0x1p-16f;
constexpr int kMostGroups = 4;      // of a block
constexpr int kShares = 8;  // of the range tried: 1 - i / 32
// Minimal average of a row's elements in integer steps: see quire/quant/int_weights.py.
constexpr float kFewestSteps = 2.3f;

struct Lanes {
    alignas(64) float v[kIntLanes];
};

QUIRE_VEC Ints magnitude_bits(Vec a) { return {bits_of(a).v & 0x7fffffff}; }

// Words of lanes low .. high.
QUIRE_VEC void store_lanes(char* to, const uint32_t* words, const PackIntsArgs& args) {
    if (args.high - args.low == kIntLanes) {
        __builtin_memcpy(to, words, kQuadBytes);
        return;
    }
    for (int64_t lane = args.low; lane < args.high; ++lane) {
        __builtin_memcpy(to + lane * 4, words + lane, 4);
    }
}

// ---- int8

void pack8(const PackIntsArgs& args) {
    Lanes scales, inverses;
    Lanes sums, counts_of;                  // of magnitudes that are not zero
    alignas(64) int32_t finite[kIntLanes];  // all bits, or none
    for (int j = 0; j < kVecs; ++j) {
        Ints most = set1_int(0);
        Vec sum = zero(), count = zero();
        for (int64_t k = 0; k < args.k; ++k) {
            const Vec x = load(args.values + k * kIntLanes + j * kLanes);
            most = max(most, magnitude_bits(x));
            sum = add(sum, abs(x));
            count = add(count, select_less(zero(), abs(x), set1(1.0f), zero()));
        }
        store_ints(finite + j * kLanes, most);
        store(sums.v + j * kLanes, sum);
        store(counts_of.v + j * kLanes, count);
    }
    int64_t coarse = 0;
    for (int lane = 0; lane < kIntLanes; ++lane) {
        float largest;
        __builtin_memcpy(&largest, &finite[lane], 4);
        const bool counts = finite[lane] < kInfinity && largest >= kTiny;
        scales.v[lane] = counts                      ? largest / 127.0f
                         : finite[lane] < kInfinity ? 0.0f
                                                    : __builtin_nanf("");
        inverses.v[lane] = counts ? 127.0f / largest : 0.0f;
        coarse += lane >= args.low && lane < args.high && counts &&
                  sums.v[lane] * inverses.v[lane] < kFewestSteps * counts_of.v[lane];
        finite[lane] = finite[lane] < kInfinity ? -1 : 0;
    }
    if (coarse != 0) __atomic_fetch_add(args.coarse_rows, coarse, __ATOMIC_RELAXED);
    const int64_t quads = int_steps(args.k) * (kIntStep / 4);
    alignas(64) uint32_t words[kIntLanes];
    for (int64_t quad = 0; quad < quads; ++quad) {
        for (int j = 0; j < kVecs; ++j) {
            Ints mask, word = set1_int(0);
            __builtin_memcpy(&mask.v, finite + j * kLanes, sizeof mask.v);
            const Vec inverse = load(inverses.v + j * kLanes);
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) {
                const int64_t k = quad * 4 + i;
                Ints q = set1_int(128);
                if (k < args.k) {
                    const Vec x = load(args.values + k * kIntLanes + j * kLanes);
                    q = add(q, round_ints(mul(of_bits({bits_of(x).v & mask.v}), inverse)));
                }
                word.v |= q.v << (8 * i);
            }
            store_ints(words + j * kLanes, word);
        }
        store_lanes(args.panel + quad * kQuadBytes, words, args);
    }
    char* at = args.panel + quads * kQuadBytes;
    for (int64_t lane = args.low; lane < args.high; ++lane) {
        __builtin_memcpy(at + lane * 4, &scales.v[lane], 4);
    }
}

// ---- int4

// A group of kLanes lanes: x [count][kLanes], finite.
struct Group {
    const float* x;
    int64_t count;

    __attribute__((always_inline)) Vec at(int64_t k) const { return load(x + k * kLanes); }
};

struct Choice {
    Vec scale, zero, error, square;  // square: sum of squares of the integers
};

QUIRE_VEC Vec round_scale(Vec a) {
    const IntLanes bits = bits_of(a).v;
    return of_bits({(bits + 0x7fff + ((bits >> 16) & 1)) & -65536});
}

QUIRE_VEC Vec quantized(Vec x, Vec inverse, Vec low, Vec high) {
    return round_near(min(high, max(low, mul(x, inverse))));
}

// The scale with the least squared error for the integers that `inverse` gives, and that error less
// the sum of squares of x, which is constant.
QUIRE_VEC Choice attempt(const Group& group, Vec inverse, Vec zero_point) {
    const Vec low = sub(zero(), zero_point), high = sub(set1(15.0f), zero_point);
    Vec product = zero(), square = zero();
    for (int64_t k = 0; k < group.count; ++k) {
        const Vec x = group.at(k), q = quantized(x, inverse, low, high);
        product = add(product, mul(x, q));
        square = add(square, mul(q, q));
    }
    const Vec scale = round_scale(div(product, square));
    const Vec error = mul(scale, sub(mul(scale, square), add(product, product)));
    return {scale, zero_point, error, square};
}

QUIRE_VEC Choice better(const Choice& best, const Choice& other) {
    return {select_less(other.error, best.error, other.scale, best.scale),
            select_less(other.error, best.error, other.zero, best.zero),
            select_less(other.error, best.error, other.error, best.error),
            select_less(other.error, best.error, other.square, best.square)};
}

QUIRE_VEC Choice choose_symmetric(const Group& group) {
    Vec largest = zero(), size = zero();
    for (int64_t k = 0; k < group.count; ++k) {
        const Vec x = group.at(k);
        largest = select_less(size, abs(x), x, largest);
        size = max(size, abs(x));
    }
    const Vec tiny = set1(kTiny);
    const Vec divisor = select_less(size, tiny, set1(1.0f), largest);
    Choice best = attempt(group, div(set1(-7.0f), divisor), set1(8.0f));
    for (int i = 1; i < kClips; ++i) {
        const float steps = -(7.0f + 0.3125f * static_cast<float>(i));
        best = better(best, attempt(group, div(set1(steps), divisor), set1(8.0f)));
    }
    best.scale = select_less(size, tiny, zero(), best.scale);
    return best;
}

QUIRE_VEC Choice choose_zero_points(const Group& group) {
    Vec low = zero(), high = zero();
    for (int64_t k = 0; k < group.count; ++k) {
        low = min(low, group.at(k));
        high = max(high, group.at(k));
    }
    const Vec spread = sub(high, low), tiny = set1(kTiny);
    Choice best{};
    for (int i = 0; i < kShares; ++i) {
        const Vec share = set1(1.0f - static_cast<float>(i) / 32.0f);
        const Vec range = select_less(spread, tiny, set1(1.0f), mul(spread, share));
        const Vec inverse = div(set1(15.0f), range);
        const Vec below = mul(mul(sub(zero(), low), share), inverse);
        const Vec zero_point = round_near(min(set1(15.0f), max(zero(), below)));
        const Choice other = attempt(group, inverse, zero_point);
        best = i == 0 ? other : better(best, other);
    }
    best.scale = select_less(spread, tiny, zero(), best.scale);
    best.zero = select_less(spread, tiny, zero(), best.zero);
    return best;
}

// ---- int4 with scales that are multiples of a step

// Per lane of `group`: all bits if its scale and integers represent it exactly, none otherwise.
QUIRE_VEC IntLanes held(const Group& group, const Choice& choice) {
    Vec squares = zero();
    for (int64_t k = 0; k < group.count; ++k) {
        const Vec x = group.at(k);
        squares = add(squares, mul(x, x));
    }
    const Vec none = zero();
    return (IntLanes)(choice.scale.v == none.v) |
           (IntLanes)(add(choice.error, squares).v <= mul(set1(kHeld), squares).v);
}

// Returns scales of a block's groups as multiples of a step, the nearest available ones.
QUIRE_VEC void choose_steps(Choice* choices, int64_t groups) {
    const Vec none = zero();
    Vec largest = zero(), best = set1(__builtin_inff());
    for (int64_t g = 0; g < groups; ++g) largest = max(largest, abs(choices[g].scale));
    const Vec power = of_bits({bits_of(largest).v & kInfinity});
    const IntLanes is_none = (IntLanes)(largest.v == none.v);
    const Vec unit = of_bits({(bits_of(mul(power, set1(0x1p-6f))).v & ~is_none) |
                              (bits_of(set1(1.0f)).v & is_none)});
    Vec chosen[kMostGroups] = {};
    for (const ScaleSteps& tried : kScaleSteps) {
        const Vec most = set1(static_cast<float>(tried.most));
        const Vec size = mul(unit, set1(static_cast<float>(tried.size)));
        const Vec step = div(size, most), inverse = div(most, size);
        Vec error = zero(), reached = zero(), scales[kMostGroups];
        for (int64_t g = 0; g < groups; ++g) {
            const Vec scale = choices[g].scale;
            const Vec steps = round_near(
                min(set1(kMostSteps), max(set1(-kMostSteps), mul(scale, inverse))));
            scales[g] = mul(step, steps);
            const Vec change = sub(scale, scales[g]);
            error = add(error, mul(choices[g].square, mul(change, change)));
            reached = max(reached, abs(steps));
        }
        const IntLanes takes =
            (IntLanes)(reached.v == most.v) & (IntLanes)(error.v < best.v);
        const auto either = [&](Vec yes, Vec no) __attribute__((always_inline)) {
            return of_bits({(bits_of(yes).v & takes) | (bits_of(no).v & ~takes)});
        };
        best = either(error, best);
        for (int64_t g = 0; g < groups; ++g) chosen[g] = either(scales[g], chosen[g]);
    }
    for (int64_t g = 0; g < groups; ++g) choices[g].scale = chosen[g];
}

// A group's part of its block.
struct GroupPlace {
    char* scales;   // [32] bf16
    char* zeros;    // [32] bytes, or null
    char* weights;  // its first oct of K
    int64_t octs;
};

// Elements of a group, in lanes that are finite.
struct GroupValues {
    alignas(64) float x[kRowGroup * kLanes];
    IntLanes finite;  // all bits, or none
};

void take(const PackIntsArgs& args, int64_t first_k, int64_t count, int64_t size, int half,
          GroupValues& to) {
    const float* values = args.values + first_k * kIntLanes + half * kLanes;
    Ints most = set1_int(0);
    for (int64_t k = 0; k < count; ++k) {
        most = max(most, magnitude_bits(load(values + k * kIntLanes)));
    }
    to.finite = most.v < kHuge;
    for (int64_t k = 0; k < size; ++k) {
        const Vec value = k < count ? load(values + k * kIntLanes) : zero();
        store(to.x + k * kLanes, of_bits({bits_of(value).v & to.finite}));
    }
}

// Half of the lanes of a block, with chosen scales.
struct GroupLanes {
    alignas(64) uint32_t words[kRowGroup / 8][kIntLanes];
    Lanes scales, zeros;
};

void round_group(const Group& group, const Choice& choice, IntLanes finite, int half,
                 GroupLanes& to) {
    const Vec none = zero();
    const Vec inverse = of_bits({bits_of(div(set1(1.0f), choice.scale)).v &
                                 (IntLanes)(choice.scale.v != none.v)});
    const Vec low = sub(zero(), choice.zero), high = sub(set1(15.0f), choice.zero);
    for (int64_t oct = 0; oct < group.count / 8; ++oct) {
        Ints word = set1_int(0);
        for (int i = 0; i < 8; ++i) {
            const Vec q = quantized(group.at(oct * 8 + i), inverse, low, high);
            const Ints nibble = round_ints(add(q, choice.zero));
            word.v |= nibble.v << (8 * (i % 4) + 4 * (i / 4));
        }
        store_ints(to.words[oct] + half * kLanes, word);
    }
    const Vec stored = of_bits({(bits_of(choice.scale).v & finite) | (0x7fc00000 & ~finite)});
    store(to.scales.v + half * kLanes, stored);
    store(to.zeros.v + half * kLanes, choice.zero);
}

void store_group(const PackIntsArgs& args, const GroupLanes& lanes, const GroupPlace& to) {
    for (int64_t oct = 0; oct < to.octs; ++oct) {
        store_lanes(to.weights + oct * kQuadBytes, lanes.words[oct], args);
    }
    for (int64_t lane = args.low; lane < args.high; ++lane) {
        const bf16 scale = round_bf16(lanes.scales.v[lane]);
        __builtin_memcpy(to.scales + lane * 2, &scale, 2);
        if (to.zeros != nullptr) to.zeros[lane] = static_cast<char>(lanes.zeros.v[lane]);
    }
}

// The groups of 128 (or the last 64) of K from `first_k` on, of which `count` exist.
void pack_block(const PackIntsArgs& args, int64_t first_k, int64_t count, char* block,
                int64_t steps) {
    const int64_t groups = block_groups(args.scheme, steps), all = steps * kIntStep;
    const int64_t size = args.scheme.group < all ? args.scheme.group : all;
    char* weights = block + block_head_bytes(args.scheme, steps);
    GroupValues values[kMostGroups];
    GroupLanes lanes[kMostGroups];
    for (int j = 0; j < kVecs; ++j) {
        Choice choices[kMostGroups];
        IntLanes kept = set1_int(-1).v;
        for (int64_t g = 0; g < groups; ++g) {
            const int64_t left = count - g * size;
            take(args, first_k + g * size, left < 0 ? 0 : left < size ? left : size, size, j,
                 values[g]);
            const Group group{values[g].x, size};
            choices[g] =
                args.scheme.has_zero_points ? choose_zero_points(group) : choose_symmetric(group);
            kept &= held(group, choices[g]);
        }
        if (!args.scheme.has_zero_points && args.scheme.group < kRowGroup) {
            Choice in_steps[kMostGroups];
            for (int64_t g = 0; g < groups; ++g) in_steps[g] = choices[g];
            choose_steps(in_steps, groups);
            for (int64_t g = 0; g < groups; ++g) {
                choices[g].scale = of_bits({(bits_of(choices[g].scale).v & kept) |
                                            (bits_of(in_steps[g].scale).v & ~kept)});
            }
        }
        for (int64_t g = 0; g < groups; ++g) {
            round_group({values[g].x, size}, choices[g], values[g].finite, j, lanes[g]);
        }
    }
    for (int64_t g = 0; g < groups; ++g) {
        char* zeros = args.scheme.has_zero_points
                          ? block + groups * kScaleBytes + g * kIntLanes
                          : nullptr;
        store_group(args, lanes[g], {block + g * kScaleBytes, zeros,
                                     weights + g * size / 8 * kQuadBytes, size / 8});
    }
}

void pack4(const PackIntsArgs& args) {
    const int64_t steps = int_steps(args.k);
    for (int64_t step = 0; step < steps; step += 2) {
        const int64_t left = args.k - step * kIntStep;
        pack_block(args, step * kIntStep, left < kRowGroup ? left : kRowGroup,
                   args.panel + block_start(args.scheme, step / 2),
                   steps - step < 2 ? 1 : 2);
    }
}

}  // namespace

void pack_ints(const PackIntsArgs& args) {
    if (args.scheme.bits == 8) {
        pack8(args);
    } else {
        pack4(args);
    }
}

}  // namespace quire::QUIRE_ISA_NS

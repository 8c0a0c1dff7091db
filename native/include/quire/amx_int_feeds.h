// Feeds of integer weights for the matrix unit, a block of 128 of K ahead and part by part, for few
// rows (amx_few_int_rows.h): int8 weights, which tiles take as they are stored, are touched and
// prefetched; int4 weights become signed bytes in the L1 cache. Only for files compiled once per
// instruction set, with AMX.
#pragma once

#include "quire/amx_int_tiles.h"

#if defined(QUIRE_AMX)

namespace quire::QUIRE_ISA_NS {

namespace {

constexpr int64_t kBlockSteps = kRowGroup / kIntStep;
constexpr int64_t kPartBytes = kTileBytes;  // of a part, 32 of K by a panel, in tile layout
constexpr int64_t kSlotBytes = 4 * kPartBytes;
constexpr int64_t kBlockOcts = kRowGroup / 8;
// int4 weights are prefetched twice: early into L2, shortly before use into L1.
constexpr int64_t kNibblesAheadBytes = 2048;
constexpr int64_t kNibblesFarBytes = 6144;

// Position of a block of K: its panel, its index, and its number of steps of 64.
struct BlockPlace {
    int64_t panel, index, steps;
};

// Prefetches int8 weights, part by part.
class Int8Feed {
  public:
    static constexpr IntForm kForm = IntForm::int8;

    __attribute__((always_inline)) Int8Feed(const AmxBlock& block, char*)
        : data_(static_cast<const char*>(block.weight.data)),
          panel_bytes_(int_panel_bytes(block.shape.k, block.weight.scheme)),
          last_(data_ + (block.weight.n + kIntLanes - 1) / kIntLanes * panel_bytes_ - kPartBytes) {
    }

    __attribute__((always_inline)) void begin(const BlockPlace&) {}
    // The current block, and the next one.
    __attribute__((always_inline)) void turn(const BlockPlace& here, const BlockPlace&) {
        weights_ = data_ + here.panel * panel_bytes_ + here.index * kSlotBytes;
    }
    __attribute__((always_inline)) const char* weights() const { return weights_; }
    __attribute__((always_inline)) const float* scales() const { return nullptr; }

    // Half of the work to interleave with a part.
    template <int kPart, int kParts, int kHalf>
    __attribute__((always_inline)) void some() {
        const char* next = weights_ + kPart * kPartBytes + kStepBytes;
        const char* touched = next < last_ ? next : last_;
        const int64_t at = kHalf * kPartBytes / 2;
        stream_.draw<8>(touched + at, next + kStepBytes + at);
    }
    __attribute__((always_inline)) bool fits() const { return true; }
    __attribute__((always_inline)) void end() const { stream_.end(); }

    static constexpr int64_t kScratchBytes = 64;

  private:
    static constexpr int64_t kStepBytes = 2 * kPartBytes;
    const char* data_;
    int64_t panel_bytes_;
    const char* last_;
    const char* weights_ = nullptr;
    Stream stream_;
};

// Encodings of int4 weights as bytes: sixteen times the integers; these less their zero points;
// times their scale's steps, which makes a block one sum (amx_int_steps.h).
enum class Int4Bytes { sixteenfold, less_zeros, in_steps };

// Converts int4 weights of kGroups groups per block to signed bytes.
template <int kGroups, Int4Bytes kBytes>
class Int4Feed {
  public:
    static constexpr bool kInSteps = kBytes == Int4Bytes::in_steps;
    static constexpr int kSums = kInSteps ? 1 : kGroups;
    static constexpr IntForm kForm = kSums == 4   ? IntForm::group32
                                     : kSums == 2 ? IntForm::group64
                                                  : IntForm::group128;
    static constexpr int64_t kScaleSlot = kSums * kIntLanes;
    // Two slots of bytes; scales are needed one block longer: three.
    static constexpr int64_t kScratchBytes = 2 * kSlotBytes + 3 * kScaleSlot * 4;

    __attribute__((always_inline)) Int4Feed(const AmxBlock& block, char* scratch)
        : data_(static_cast<const char*>(block.weight.data)),
          scheme_(block.weight.scheme),
          panel_bytes_(int_panel_bytes(block.shape.k, block.weight.scheme)),
          bytes_(scratch),
          scales_(reinterpret_cast<float*>(scratch + 2 * kSlotBytes)) {}

    // Prepares the first block.
    __attribute__((always_inline)) void begin(const BlockPlace& first) {
        aim(first);
        begin_block();
        for (int oct = 0; oct < octs_; ++oct) {
            if (oct % kGroupOcts == 0) begin_group(oct / kGroupOcts);
            expand(oct);
        }
    }
    __attribute__((always_inline)) void turn(const BlockPlace&, const BlockPlace& next) {
        slot_ = 1 - slot_;
        here_scales_ = next_scales();
        scale_slot_ = scale_slot_ == 2 ? 0 : scale_slot_ + 1;
        aim(next);
    }
    __attribute__((always_inline)) const char* weights() const {
        return bytes_ + (1 - slot_) * kSlotBytes;
    }
    __attribute__((always_inline)) const float* scales() const { return here_scales_; }

    template <int kPart, int kParts, int kHalf>
    __attribute__((always_inline)) void some() {
        if constexpr (kHalf == 0 && kPart == 0) begin_block();
        constexpr int kEach = static_cast<int>(kBlockOcts) / kParts / 2;
        constexpr int kFirst = (2 * kPart + kHalf) * kEach;
        if (octs_ < kFirst + kEach) return;  // a block of 64: four of these or none
        if constexpr (kFirst % kGroupOcts == 0) begin_group(kFirst / kGroupOcts);
#pragma GCC unroll 4
        for (int oct = kFirst; oct < kFirst + kEach; ++oct) expand(oct);
    }
    // Returns whether all weights so far could be converted.
    __attribute__((always_inline)) bool fits() const { return found_ == 0xffff; }
    __attribute__((always_inline)) void end() const {}

  private:
    static constexpr int kGroupOcts = static_cast<int>(kBlockOcts) / kGroups;

    __attribute__((always_inline)) float* next_scales() const {
        return scales_ + scale_slot_ * kScaleSlot;
    }
    __attribute__((always_inline)) void aim(const BlockPlace& at) {
        head_ = data_ + at.panel * panel_bytes_ + block_start(scheme_, at.index);
        groups_ = block_groups(scheme_, at.steps);
        weights_ = head_ + block_head_bytes(scheme_, at.steps);
        octs_ = at.steps * kIntStep / 8;
        to_ = bytes_ + slot_ * kSlotBytes;
    }
    __attribute__((always_inline)) void begin_block() {
        for (int64_t g = 0; g < groups_; ++g) {
            prefetch_l1(head_ + g * kScaleBytes + kNibblesAheadBytes);
        }
        if constexpr (kInSteps) {
            step_ = StepsOfBlock::of<kGroups>(head_, groups_);
            store(next_scales(), step_.step[0]);
            store(next_scales() + kLanes, step_.step[1]);
        } else {
            widen_scales();
        }
    }
    __attribute__((always_inline)) void begin_group(int64_t g) {
        if constexpr (kInSteps) {
            const GroupSteps steps = step_.of_group(head_ + g * kScaleBytes);
            found_ &= steps.found;
            multiples_[0] = StepBytes::of(steps.count[0]);
            multiples_[1] = StepBytes::of(steps.count[1]);
        }
    }
    __attribute__((always_inline)) void widen_scales() {
        const Vec unit = set1(kBytes == Int4Bytes::sixteenfold ? 0x1p-4f : 1.0f);
        float* to = next_scales();
        for (int64_t g = 0; g < groups_; ++g) {
            const auto* scales = reinterpret_cast<const bf16*>(head_ + g * kScaleBytes);
            store(to + g * kIntLanes, mul(load(scales), unit));
            store(to + g * kIntLanes + kLanes, mul(load(scales + kLanes), unit));
        }
    }
    // Eight of K.
    __attribute__((always_inline)) void expand(int64_t oct) const {
        const __m512i lower = _mm512_set1_epi8(15);
#pragma GCC unroll 2
        for (int j = 0; j < 2; ++j) {
            const char* from = weights_ + oct * kQuadBytes + j * 64;
            prefetch_l1(from + kNibblesAheadBytes);
            prefetch_l2(from + kNibblesFarBytes);
            memory_barrier();  // or GCC combines the prefetches, which then wait for each other
            const __m512i w = _mm512_load_si512(from);
            __m512i low, high;
            if constexpr (kBytes == Int4Bytes::sixteenfold) {  // (a ^ offset) & upper
                const __m512i offset = _mm512_set1_epi8(static_cast<char>(0x88));
                const __m512i upper = _mm512_set1_epi8(static_cast<char>(0xf0));
                low = _mm512_ternarylogic_epi32(_mm512_slli_epi16(w, 4), offset, upper, 0x28);
                high = _mm512_ternarylogic_epi32(w, offset, upper, 0x28);
            } else {
                low = _mm512_and_si512(w, lower);
                high = _mm512_and_si512(_mm512_srli_epi16(w, 4), lower);
                if constexpr (kInSteps) {
                    low = multiples_[j].bytes(low);
                    high = multiples_[j].bytes(high);
                } else {
                    const __m512i zero = zero_points(oct, j);
                    low = _mm512_sub_epi8(low, zero);
                    high = _mm512_sub_epi8(high, zero);
                }
            }
            char* to = to_ + oct / 8 * 2 * kTileBytes + j * kTileBytes + oct % 8 * 128;
            _mm512_store_si512(to, low);
            _mm512_store_si512(to + 64, high);
        }
    }
    // Of the lanes' half `j`, four bytes a lane.
    __attribute__((always_inline)) __m512i zero_points(int64_t oct, int j) const {
        const char* at = head_ + groups_ * kScaleBytes + oct / kGroupOcts * kIntLanes + j * kLanes;
        const __m512i words =
            _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
        return _mm512_mullo_epi32(words, _mm512_set1_epi32(0x01010101));
    }

    const char* data_;
    const IntScheme& scheme_;
    int64_t panel_bytes_;
    char* bytes_;
    float* scales_;
    const float* here_scales_ = nullptr;
    int64_t slot_ = 0, scale_slot_ = 0;  // of the block in preparation
    const char *head_ = nullptr, *weights_ = nullptr;
    char* to_ = nullptr;
    int64_t groups_ = 0, octs_ = 0;
    StepsOfBlock step_;
    StepBytes multiples_[2];  // of the group in preparation, half of the lanes each
    __mmask16 found_ = 0xffff;
};

}  // namespace

}  // namespace quire::QUIRE_ISA_NS

#endif

// Integer products of few rows on the matrix unit: up to two tiles of rows, weights from memory
// (recipe: int_tiles.h; more rows: amx_int_tiles.h). They are bound by reading the weights, so all
// is made to keep that read going.
//
// K goes in blocks of 128. While the tiles multiply a block, the sums of the one before are folded
// and the next one is brought near, a part of 32 of K after the other: int8 weights, which tiles
// take as they lie, are touched and fetched (Stream); those of int4 become signed bytes in a slot
// of the first-level cache. A panel's rows are finished as their last sums are folded.
// Only for files compiled once per instruction set, of which one has AMX.
#pragma once

#include "quire/amx_int_tiles.h"

#if defined(QUIRE_AMX)

namespace quire::QUIRE_ISA_NS {

namespace {

constexpr int64_t kFewRows = kPackRows;     // two tiles
constexpr int64_t kBlockSteps = kRowGroup / kIntStep;
constexpr int64_t kPartBytes = kTileBytes;  // of a part, 32 of K by a panel, as tiles take them
constexpr int64_t kSlotBytes = 4 * kPartBytes;
constexpr int64_t kBlockOcts = kRowGroup / 8;
// int4 weights are fetched twice: soon into the second-level cache, shortly before into the first.
constexpr int64_t kNibblesAheadBytes = 2048;
constexpr int64_t kNibblesFarBytes = 6144;

template <IntForm form>
constexpr int kBlockSums = form == IntForm::group32 ? 4 : form == IntForm::group64 ? 2 : 1;

// Where a block of K lies: its panel, which block of it, and how many steps of 64 it has.
struct BlockPlace {
    int64_t panel, index, steps;
};

// Walks the blocks of panels first .. end; the last one is followed by itself.
class BlockWalk {
  public:
    QUIRE_VEC BlockWalk over(const AmxBlock& block) {
        return {block.shape.steps, block.end_panel, {block.first_panel, 0, 0}};
    }
    __attribute__((always_inline)) BlockPlace here() const { return at_; }
    __attribute__((always_inline)) void go_on() {
        if (at_.index + 1 < blocks_) {
            ++at_.index;
        } else if (at_.panel + 1 < end_panel_) {
            ++at_.panel;
            at_.index = 0;
        }
        set_steps();
    }

  private:
    __attribute__((always_inline)) BlockWalk(int64_t steps, int64_t end_panel, BlockPlace at)
        : steps_(steps), blocks_((steps + 1) / kBlockSteps), end_panel_(end_panel), at_(at) {
        set_steps();
    }
    __attribute__((always_inline)) void set_steps() {
        const int64_t left = steps_ - at_.index * kBlockSteps;
        at_.steps = left < kBlockSteps ? left : kBlockSteps;
    }

    int64_t steps_, blocks_, end_panel_;
    BlockPlace at_;
};

// The sums of a block that wait to be folded.
template <IntForm form>
struct WaitingSums {
    const int32_t* sums = nullptr;  // [rows][sums of a block][32]; null: none
    const float* scales;            // of the rows
    const int32_t* starts;          // of int8
    const float* weight_scales;     // [sums][32], of int4
    int64_t panel;
    bool begins, ends;  // F starts at zero; is complete then
};

// Rows first .. end of a block with kSums sums into F [rows][32], in the recipe's order.
template <IntForm form, int kSums>
QUIRE_VEC void fold_block_sums(const WaitingSums<form>& waiting, float* out, int64_t first,
                               int64_t end) {
    constexpr bool kIsInt8 = form == IntForm::int8;
    const int32_t* sums = waiting.sums + first * kBlockSums<form> * kIntLanes;
    const float* scales = waiting.scales;
    const int32_t* starts = waiting.starts;
    const bool begins = waiting.begins;
    Vec weight_scales[kSums][2];
    if constexpr (!kIsInt8) {
#pragma GCC unroll 4
        for (int g = 0; g < kSums; ++g) {
            weight_scales[g][0] = load(waiting.weight_scales + g * kIntLanes);
            weight_scales[g][1] = load(waiting.weight_scales + g * kIntLanes + kLanes);
        }
    }
    for (int64_t row = first; row < end; ++row) {
        const Vec scale = set1(scales[row]);
        float* to = out + row * kIntLanes;
#pragma GCC unroll 2
        for (int j = 0; j < 2; ++j) {
            const Vec f = begins ? zero() : load(to + j * kLanes);
            const int32_t* from = sums + j * kLanes;
            Vec t;
            if constexpr (kIsInt8) {
                t = {_mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_load_si512(from),
                                                         _mm512_set1_epi32(starts[row])))};
            } else {
                t = zero();
#pragma GCC unroll 4
                for (int g = 0; g < kSums; ++g) {
                    const __m512i sum = _mm512_load_si512(from + g * kIntLanes);
                    t = fma({_mm512_cvtepi32_ps(sum)}, weight_scales[g][j], t);
                }
            }
            store(to + j * kLanes, fma(t, scale, f));
        }
        sums += kBlockSums<form> * kIntLanes;
    }
}

// Brings int8 weights near, part by part.
class Int8Feed {
  public:
    __attribute__((always_inline)) Int8Feed(const AmxBlock& block, char*)
        : data_(static_cast<const char*>(block.weight.data)),
          panel_bytes_(int_panel_bytes(block.shape.k, block.weight.scheme)),
          last_(data_ + (block.weight.n + kIntLanes - 1) / kIntLanes * panel_bytes_ - kPartBytes) {
    }

    __attribute__((always_inline)) void begin(const BlockPlace&) {}
    // The block whose turn it is, and the one behind it.
    __attribute__((always_inline)) void turn(const BlockPlace& here, const BlockPlace&) {
        weights_ = data_ + here.panel * panel_bytes_ + here.index * kSlotBytes;
    }
    __attribute__((always_inline)) const char* weights() const { return weights_; }
    __attribute__((always_inline)) const float* scales() const { return nullptr; }

    // Half of what is to be done beside a part.
    template <int kPart, int kParts, int kHalf>
    __attribute__((always_inline)) void some() {
        const char* next = weights_ + kPart * kPartBytes + kStepBytes;
        const char* touched = next < last_ ? next : last_;
        const int64_t at = kHalf * kPartBytes / 2;
        stream_.draw<8>(touched + at, next + kStepBytes + at);
    }
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

// Makes signed bytes of int4 weights, a block ahead, part by part.
template <IntForm form, bool zeros>
class Int4Feed {
  public:
    static constexpr int kSums = kBlockSums<form>;
    static constexpr int64_t kScaleSlot = kSums * kIntLanes;
    // Two slots of bytes; scales are needed for a block longer, by the fold: three.
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
        widen_scales();
        for (int64_t oct = 0; oct < octs_; ++oct) expand(oct);
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
        if constexpr (kHalf == 0 && kPart == 0) widen_scales();
        constexpr int kEach = static_cast<int>(kBlockOcts) / kParts / 2;
        constexpr int kFirst = (2 * kPart + kHalf) * kEach;
        if (octs_ < kFirst + kEach) return;  // a block of 64: four of these or none
#pragma GCC unroll 4
        for (int oct = kFirst; oct < kFirst + kEach; ++oct) expand(oct);
    }
    __attribute__((always_inline)) void end() const {}

  private:
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
    __attribute__((always_inline)) void widen_scales() {
        // Without zero points bytes are sixteen times what they stand for.
        const Vec unit = set1(zeros ? 1.0f : 0x1p-4f);
        float* to = next_scales();
        for (int64_t g = 0; g < groups_; ++g) {
            const char* from = head_ + g * kScaleBytes;
            prefetch_l1(from + kNibblesAheadBytes);
            const auto* scales = reinterpret_cast<const bf16*>(from);
            store(to + g * kIntLanes, mul(load(scales), unit));
            store(to + g * kIntLanes + kLanes, mul(load(scales + kLanes), unit));
        }
    }
    // Eight of K.
    __attribute__((always_inline)) void expand(int64_t oct) const {
        const __m512i offset = _mm512_set1_epi8(static_cast<char>(0x88));
        const __m512i upper = _mm512_set1_epi8(static_cast<char>(0xf0));
        const __m512i lower = _mm512_set1_epi8(15);
#pragma GCC unroll 2
        for (int j = 0; j < 2; ++j) {
            const char* from = weights_ + oct * kQuadBytes + j * 64;
            prefetch_l1(from + kNibblesAheadBytes);
            prefetch_l2(from + kNibblesFarBytes);
            memory_barrier();  // or GCC brings the fetches together, and they wait for each other
            const __m512i w = _mm512_load_si512(from);
            __m512i low, high;
            if constexpr (zeros) {
                const __m512i zero = zero_points(oct, j);
                low = _mm512_sub_epi8(_mm512_and_si512(w, lower), zero);
                high = _mm512_sub_epi8(_mm512_and_si512(_mm512_srli_epi16(w, 4), lower), zero);
            } else {  // (a ^ offset) & upper
                low = _mm512_ternarylogic_epi32(_mm512_slli_epi16(w, 4), offset, upper, 0x28);
                high = _mm512_ternarylogic_epi32(w, offset, upper, 0x28);
            }
            char* to = to_ + oct / 8 * 2 * kTileBytes + j * kTileBytes + oct % 8 * 128;
            _mm512_store_si512(to, low);
            _mm512_store_si512(to + 64, high);
        }
    }
    // Of the lanes' half `j`, four bytes a lane.
    __attribute__((always_inline)) __m512i zero_points(int64_t oct, int j) const {
        constexpr int64_t kGroupOcts = kBlockOcts / kSums;
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
    int64_t slot_ = 0, scale_slot_ = 0;  // of the block that is being prepared
    const char *head_ = nullptr, *weights_ = nullptr;
    char* to_ = nullptr;
    int64_t groups_ = 0, octs_ = 0;
};

template <IntForm form, bool zeros>
struct FeedOf {
    using Type = Int4Feed<form, zeros>;
};
template <>
struct FeedOf<IntForm::int8, false> {
    using Type = Int8Feed;
};

// A tile's sums to memory, and the tile begun anew.
#define QUIRE_NEXT_SUM(tile, held, sum_bytes)                                                 \
    do {                                                                                      \
        _tile_stored(tile,                                                                    \
                     (held) + (tile) / 2 * kTileRows * (sum_bytes) / 4 + (tile) % 2 * kLanes, \
                     sum_bytes);                                                              \
        _tile_zero(tile);                                                                     \
    } while (false)

// The products of panels first .. end by all rows.
template <IntForm form, bool zeros, bool two, class Finish>
class FewRows {
    using Feed = typename FeedOf<form, zeros>::Type;
    static constexpr int kSums = kBlockSums<form>;
    static constexpr bool kIsInt8 = form == IntForm::int8;
    static constexpr int64_t kSumStride = kSums * kIntLanes * 4;  // bytes between rows
    static constexpr int64_t kMostRows = two ? kFewRows : kTileRows;
    static constexpr int64_t kSumCount = kMostRows * kSums * kIntLanes;

  public:
    __attribute__((always_inline)) FewRows(const AmxBlock& block, const Finish& finish)
        : block_(block),
          finish_(finish),
          pack_{block.rows_base, block.rows},
          feed_(block, scratch_) {}

    __attribute__((always_inline)) void run() {
        configure_int_tiles(block_.rows, form == IntForm::group32);
        BlockWalk next = BlockWalk::over(block_);
        feed_.begin(next.here());
        const int64_t blocks = (block_.shape.steps + 1) / kBlockSteps;
        const int64_t count = (block_.end_panel - block_.first_panel) * blocks;
        for (int64_t i = 0; i < count; ++i) {
            const BlockPlace here = next.here();
            next.go_on();
            feed_.turn(here, next.here());
            if (here.steps == kBlockSteps) {
                multiply<4>(here);
            } else {
                multiply<2>(here);
            }
            waiting_ = {sums_[turn_],
                        pack_.scales(block_.shape) + here.index * block_.rows,
                        pack_.starts(block_.shape) + here.index * block_.rows,
                        feed_.scales(),
                        here.panel,
                        here.index == 0,
                        here.index + 1 == blocks};
            waiting_sums_ = here.steps == kBlockSteps ? kSums : (kSums + 1) / 2;
            turn_ = 1 - turn_;
        }
        memory_barrier();
        store_tiles();
        memory_barrier();
        fold(0, block_.rows);
        release_tiles();
        feed_.end();
    }

  private:
    __attribute__((always_inline)) void store_tiles() {
        QUIRE_NEXT_SUM(0, held_, kSumStride);
        QUIRE_NEXT_SUM(1, held_, kSumStride);
        if constexpr (two) {
            QUIRE_NEXT_SUM(2, held_, kSumStride);
            QUIRE_NEXT_SUM(3, held_, kSumStride);
        }
    }

    // Rows first .. end of the block before.
    __attribute__((always_inline)) void fold(int64_t first, int64_t end) {
        if (end > block_.rows) end = block_.rows;
        if (first >= end || waiting_.sums == nullptr) return;
        if (waiting_sums_ == kSums) {
            fold_block_sums<form, kSums>(waiting_, out_, first, end);
        } else {
            fold_block_sums<form, (kSums + 1) / 2>(waiting_, out_, first, end);
        }
        if (waiting_.ends) finish_(waiting_.panel, out_ + first * kIntLanes, first, end - first);
    }

    // The tiles' work of a part. Of 32 of K both halves of the lanes; of a step one after another.
    template <int kPart>
    __attribute__((always_inline)) void multiply_part(const int8_t* x, const char* weights,
                                                      int32_t* sums) {
        constexpr int kStep = kPart / 2, kHalf = kPart % 2;
        constexpr int kStride = kIsInt8 ? 128 : 64;
        constexpr int64_t kSecond = kIsInt8 ? 64 : kTileBytes;  // lanes 16 to 31
        const int8_t* upper = x + kStep * block_.rows * kIntStep;
        const char* w = weights + kStep * 2 * kTileBytes;
        int32_t* held = held_;
        memory_barrier();
        if constexpr (form == IntForm::group32) {
            upper += kHalf * 32;
            w += kHalf * 512;
            _tile_loadd(6, w, kStride);
            _tile_loadd(4, upper, 64);
            QUIRE_NEXT_SUM(0, held, kSumStride);
            _tile_dpbssd(0, 4, 6);
            _tile_loadd(7, w + kSecond, kStride);
            QUIRE_NEXT_SUM(1, held, kSumStride);
            _tile_dpbssd(1, 4, 7);
            if constexpr (two) {
                _tile_loadd(5, upper + kTileRows * kIntStep, 64);
                QUIRE_NEXT_SUM(2, held, kSumStride);
                _tile_dpbssd(2, 5, 6);
                QUIRE_NEXT_SUM(3, held, kSumStride);
                _tile_dpbssd(3, 5, 7);
            }
            held_ = sums + kPart * kIntLanes;
        } else {
            constexpr bool kBegins = kStep == 0 || form == IntForm::group64;
            if constexpr (kHalf == 0) {
                _tile_loadd(6, w, kStride);
                _tile_loadd(4, upper, 64);
                if (kBegins) QUIRE_NEXT_SUM(0, held, kSumStride);
                if constexpr (kIsInt8) _tile_dpbsud(0, 4, 6); else _tile_dpbssd(0, 4, 6);
                if constexpr (two) {
                    _tile_loadd(5, upper + kTileRows * kIntStep, 64);
                    if (kBegins) QUIRE_NEXT_SUM(2, held, kSumStride);
                    if constexpr (kIsInt8) _tile_dpbsud(2, 5, 6); else _tile_dpbssd(2, 5, 6);
                }
            } else {
                _tile_loadd(7, w + kSecond, kStride);
                if (kBegins) QUIRE_NEXT_SUM(1, held, kSumStride);
                if constexpr (kIsInt8) _tile_dpbsud(1, 4, 7); else _tile_dpbssd(1, 4, 7);
                if constexpr (two) {
                    if (kBegins) QUIRE_NEXT_SUM(3, held, kSumStride);
                    if constexpr (kIsInt8) _tile_dpbsud(3, 5, 7); else _tile_dpbssd(3, 5, 7);
                }
                held_ = sums + kStep * (kSums - 1) * kIntLanes;
            }
        }
        memory_barrier();
    }

    template <int kPart, int kParts>
    __attribute__((always_inline)) void part(const BlockPlace& here) {
        const int8_t* x = pack_.step(here.index * kBlockSteps);
        feed_.template some<kPart, kParts, 0>();
        multiply_part<kPart>(x, feed_.weights(), sums_[turn_]);
        feed_.template some<kPart, kParts, 1>();
        // The last sums of the block before are all in memory once the second part has begun.
        if constexpr (kPart > 0) {
            const int64_t each = (block_.rows + kParts - 2) / (kParts - 1);
            fold((kPart - 1) * each, kPart * each);
        }
    }

    // A block of kParts parts.
    template <int kParts>
    __attribute__((always_inline)) void multiply(const BlockPlace& here) {
        part<0, kParts>(here);
        part<1, kParts>(here);
        if constexpr (kParts == 4) {
            part<2, kParts>(here);
            part<3, kParts>(here);
        }
    }

    alignas(64) int32_t sums_[2][kSumCount];  // of a block and the one before
    alignas(64) float out_[kMostRows * kIntLanes];
    alignas(64) char scratch_[Feed::kScratchBytes];
    const AmxBlock& block_;
    const Finish& finish_;
    RowPack pack_;
    Feed feed_;
    int turn_ = 0;
    int32_t* held_ = sums_[1];  // where the sums in the tiles belong
    WaitingSums<form> waiting_;
    int waiting_sums_ = 0;
};

template <IntForm form, bool zeros, bool two, class Finish>
__attribute__((noinline)) void few_int_panels(const AmxBlock& block, const Finish& finish) {
    FewRows<form, zeros, two, Finish> rows(block, finish);
    rows.run();
}

}  // namespace

}  // namespace quire::QUIRE_ISA_NS

#endif

// Integer products of few rows on the matrix unit: up to two tiles of rows, weights from memory
// (recipe: int_tiles.h; more rows: amx_int_tiles.h). They are bound by reading the weights, so
// everything serves to keep that read going.
//
// K is divided into blocks of 128. While the tiles multiply a block, the sums of the previous one
// are scaled and the next one is prefetched, in parts of 32 of K (amx_int_feeds.h). A panel's rows
// are finished with their last sums. Only for files compiled once per instruction set, with AMX.
#pragma once

#include "quire/amx_int_feeds.h"

#if defined(QUIRE_AMX)

namespace quire::QUIRE_ISA_NS {

namespace {

constexpr int64_t kFewRows = kPackRows;  // two tiles

template <IntForm form>
constexpr int kBlockSums = form == IntForm::group32 ? 4 : form == IntForm::group64 ? 2 : 1;

// Iterates over the blocks of panels first .. end; the last one is followed by itself.
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

// The sums of a block that are not scaled yet.
template <IntForm form>
struct WaitingSums {
    const int32_t* sums = nullptr;  // [rows][sums of a block][32]; null: none
    const float* scales;            // of the rows
    const int32_t* starts;          // of int8
    const float* weight_scales;     // [sums][32], of int4
    int64_t panel;
    bool begins, ends;  // F starts at zero; is complete afterwards
};

// Adds rows first .. end of a block with kSums sums to F [rows][32], in the recipe's order.
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

// Stores a tile's sums and zeroes the tile.
#define QUIRE_NEXT_SUM(tile, held, sum_bytes)                                                 \
    do {                                                                                      \
        _tile_stored(tile,                                                                    \
                     (held) + (tile) / 2 * kTileRows * (sum_bytes) / 4 + (tile) % 2 * kLanes, \
                     sum_bytes);                                                              \
        _tile_zero(tile);                                                                     \
    } while (false)

// Multiplies panels first .. end by all rows.
template <class Feed, bool two, class Finish>
class FewRows {
    static constexpr IntForm form = Feed::kForm;
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

    // Returns false if the feed does not support the weights: the output must not be used then.
    __attribute__((always_inline)) bool run() {
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
            if (!feed_.fits()) break;
        }
        memory_barrier();
        store_tiles();
        memory_barrier();
        fold(0, block_.rows);
        release_tiles();
        feed_.end();
        return feed_.fits();
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

    // Rows first .. end of the previous block.
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
        // The last sums of the previous block are in memory once the second part has begun.
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

    alignas(64) int32_t sums_[2][kSumCount];  // of this block and the previous one
    alignas(64) float out_[kMostRows * kIntLanes];
    alignas(64) char scratch_[Feed::kScratchBytes];
    const AmxBlock& block_;
    const Finish& finish_;
    RowPack pack_;
    Feed feed_;
    int turn_ = 0;
    int32_t* held_ = sums_[1];  // destination of the sums in the tiles
    WaitingSums<form> waiting_;
    int waiting_sums_ = 0;
};

template <class Feed, bool two, class Finish>
__attribute__((noinline)) bool few_int_panels(const AmxBlock& block, const Finish& finish) {
    FewRows<Feed, two, Finish> rows(block, finish);
    return rows.run();
}

}  // namespace

}  // namespace quire::QUIRE_ISA_NS

#endif

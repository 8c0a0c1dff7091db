// Tile products in small steps, interleaved with vector work of the caller: the matrix unit and the
// vector units of a core only work in parallel if their instructions are interleaved.
//
// Steps are planned, then taken one by one while something else is computed, in the order they were
// planned. The input of a step must be complete when it is taken; its output is complete after
// `finish`.
#pragma once

#include "quire/amx_tiles.h"
#include "quire/vec.h"

#if defined(QUIRE_AMX)

namespace quire::QUIRE_ISA_NS {

namespace {

// One step of K of up to 32 rows by 32 columns.
struct TileStep {
    const bf16 *x, *left, *right;  // rows; the two halves of the weight, 16 columns each
    // destination of the sums, in the last step of a chain; else null
    float* sums;
    int32_t x_stride, w_stride, sums_stride;  // bytes
    bool two;                      // whether there are more than 16 rows
    bool first;                    // of its chain
};

// The intrinsics need literal tile numbers. Sums of a chain are stored one by one, each before its
// tile is restarted: four consecutive stores stall the unit.
#define QUIRE_STORE_TILE(tile, held, stride)                                                     \
    _tile_stored(tile, reinterpret_cast<char*>(held) + (tile) / 2 * kTileRows * (stride) +       \
                           (tile) % 2 * 64, stride)
#define QUIRE_TAKE_TILE(tile, held, stride)                            \
    do {                                                               \
        if ((held) != nullptr) QUIRE_STORE_TILE(tile, held, stride);   \
        _tile_zero(tile);                                              \
    } while (false)

class TileSteps {
  public:
    static constexpr int kMost = 128;  // steps planned at once

    void plan(const TileStep& step) { steps_[count_++] = step; }

    // The planned steps will be taken in `slots` calls of take_some.
    void spread(int slots) {
        slots_ = slots;
        due_ = 0;
    }

    __attribute__((always_inline)) void take_some() {
        for (due_ += count_; due_ >= slots_; due_ -= slots_) take();
    }

    void finish() {
        while (next_ < count_) take();
        next_ = count_ = 0;
        if (held_ == nullptr) return;
        memory_barrier();
        QUIRE_STORE_TILE(0, held_, held_stride_);
        QUIRE_STORE_TILE(1, held_, held_stride_);
        if (held_two_) {
            QUIRE_STORE_TILE(2, held_, held_stride_);
            QUIRE_STORE_TILE(3, held_, held_stride_);
        }
        memory_barrier();
        held_ = nullptr;
    }

  private:
    __attribute__((always_inline)) void take() {
        if (next_ == count_) return;
        const TileStep& step = steps_[next_++];
        memory_barrier();
        float* const held = held_;
        const int32_t stride = held_stride_;
        const bool first = step.first;
        _tile_loadd(6, step.left, step.w_stride);
        _tile_loadd(4, step.x, step.x_stride);
        if (first) QUIRE_TAKE_TILE(0, held, stride);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, step.right, step.w_stride);
        if (first) QUIRE_TAKE_TILE(1, held, stride);
        _tile_dpbf16ps(1, 4, 7);
        if (step.two) {
            _tile_loadd(5, reinterpret_cast<const char*>(step.x) + kTileRows * step.x_stride,
                        step.x_stride);
            if (first) QUIRE_TAKE_TILE(2, held, stride);
            _tile_dpbf16ps(2, 5, 6);
            if (first) QUIRE_TAKE_TILE(3, held, stride);
            _tile_dpbf16ps(3, 5, 7);
        }
        if (first && !step.two && held != nullptr && held_two_) {
            QUIRE_STORE_TILE(2, held, stride);
            QUIRE_STORE_TILE(3, held, stride);
        }
        held_ = step.sums;
        held_two_ = step.two;
        held_stride_ = step.sums_stride;
        memory_barrier();
    }

    float* held_ = nullptr;  // destination of the sums in the tiles
    bool held_two_ = false;  // all four tiles, or the upper two
    int32_t held_stride_ = 0;
    int next_ = 0, count_ = 0, slots_ = 1, due_ = 0;
    TileStep steps_[kMost];
};

}  // namespace

}  // namespace quire::QUIRE_ISA_NS

#endif

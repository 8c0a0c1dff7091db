// Scales of int4 groups as whole multiples of a step, one step for 128 of K of an output.
//
// The largest scale is size / 64 of a power of two and `most` steps, the others are fewer; the
// significand of a step has at most three bits. Then a sum of 128 products of activations (127),
// weights (8) and steps (15), times the significand (7), is below 2^24: f32 holds every partial sum
// of the recipe exactly, and so integers give its bits. quire/quant/int_weights.py builds the same
// list. A size has one entry.
#pragma once

#include <cstdint>

namespace quire {

struct ScaleSteps {
    int32_t size, most;
};

constexpr float kMostSteps = 15.0f;
constexpr ScaleSteps kScaleSteps[] = {
    {64, 8},  {65, 13}, {66, 11}, {70, 14}, {72, 12},  {75, 15},  {77, 11},  {78, 13},
    {80, 10}, {84, 14}, {88, 11}, {90, 15}, {91, 13},  {96, 12},  {98, 14},  {100, 10},
    {104, 13}, {105, 15}, {108, 9}, {110, 11}, {112, 14}, {120, 15}, {126, 9},
};

}  // namespace quire

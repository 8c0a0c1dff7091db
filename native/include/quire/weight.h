// A weight of a program, in the layout of its kernels, filled part by part from a checkpoint's raw
// elements. The padding of panels is zero (or counts as zero), and a vector is f32 whatever type
// was requested.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "quire/hash.h"
#include "quire/kernels.h"
#include "quire/memory.h"

namespace quire {

class WeightStream;

enum class Form : int32_t { matrix = 0, table = 1, vector = 2 };
enum class Source : int32_t { f32 = 0, f16 = 1, bf16 = 2 };

static inline int64_t source_bytes(Source source) { return source == Source::f32 ? 4 : 2; }

// Rows first_row .. of a checkpoint's tensor of `of_rows` rows: [of_rows, columns], or, if it is
// stored transposed, [columns, of_rows].
struct SourceRows {
    const uint8_t* bytes;  // of the whole tensor
    Source type;
    int64_t first_row, of_rows;
    bool transposed;
    Content* content;  // digest of the whole tensor, computed on the way; null: computed before
};

// Increased when the meaning of packed bytes changes, or the same elements pack to other bytes:
// files of packed weights with another number are not read.
constexpr int64_t kPackedLayout = 2;

class Weight {
  public:
    // matrix: panels (see PackedMatrix); table: [rows, columns]; vector: f32 [rows]. A matrix may
    // be of integers: it is quantized while it is filled, row by row.
    Weight(Form form, Type type, int64_t rows, int64_t columns, IntScheme ints = {});

    // Wraps a weight packed into `bytes` bytes at `packed`, which outlive it, are aligned to 64 and
    // followed by 64 readable bytes. Throws std::invalid_argument if they do not fit.
    Weight(Form form, Type type, int64_t rows, int64_t columns, IntScheme ints,
           const char* packed, int64_t bytes);

    // Wraps a packed weight that a stream reads as its range `range`: its bytes may be used between
    // acquire() and release() of the stream only. Throws as above.
    Weight(Form form, Type type, int64_t rows, int64_t columns, IntScheme ints,
           std::shared_ptr<WeightStream> stream, int64_t range);

    // Converts `count` rows of `source` into rows first .. first + count, adding `offset` to each
    // element in f32. Throws std::out_of_range past the last row of the weight or the source, and
    // std::logic_error if the weight was packed before.
    void fill(Pool& pool, int64_t first, int64_t count, const SourceRows& source, float offset);

    Form form() const { return form_; }
    Type type() const { return type_; }
    int64_t rows() const { return rows_; }
    int64_t columns() const { return columns_; }
    const char* data() const { return memory_.data(); }
    int64_t bytes() const { return static_cast<int64_t>(memory_.bytes()); }
    PackedMatrix matrix() const { return {memory_.data(), rows_, columns_, type_}; }
    bool has_ints() const { return ints_.bits != 0; }
    PackedInts ints() const { return {memory_.data(), rows_, columns_, ints_}; }
    // Returns the rows filled so far for which 8 bits are too coarse: a few elements dominate the
    // others.
    int64_t coarse_rows() const { return coarse_rows_; }
    // The stream that reads it, or null where its bytes are always there.
    WeightStream* stream() const { return stream_.get(); }
    const std::shared_ptr<WeightStream>& shared_stream() const { return stream_; }
    int64_t range() const { return range_; }
    const float* vector() const { return reinterpret_cast<const float*>(memory_.data()); }

    // Returns row `row` as f32, for checks.
    std::vector<float> row(int64_t row) const;

  private:
    int64_t packed_size() const;

    Form form_;
    Type type_;
    int64_t rows_, columns_;
    IntScheme ints_;
    int64_t coarse_rows_ = 0;
    Memory memory_;
    std::shared_ptr<WeightStream> stream_;
    int64_t range_ = 0;
};

}  // namespace quire

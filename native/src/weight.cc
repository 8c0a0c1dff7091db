// Packing: checkpoint elements (f32, f16, bf16) become the program's dtype in the kernels' layout,
// in one pass over the source, which is digested on the way; a transposed source is read in place.
// Rounding to bf16 happens here once, to nearest even; so does quantizing, which starts from the
// checkpoint's elements in f32. Packed bytes depend on the elements only, never on threads or on
// the division of a weight into parts; padding is not written and stays zero.

#include "quire/weight.h"
#include "quire/weight_stream.h"

#include <cstring>
#include <stdexcept>
#include <string>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace quire {

namespace {

constexpr int64_t kColumnBlock = 64;  // columns of 32 rows are transposed at a time, within L1
constexpr int64_t kShares = 64;       // units of work without a digest

float widen_half(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
    const uint32_t magnitude = half & 0x7fffu;
    float value;
    if (magnitude >= 0x7c00u) {  // infinity and NaN
        const uint32_t bits = sign | 0x7f800000u | (magnitude & 0x3ffu) << 13;
        std::memcpy(&value, &bits, 4);
        return value;
    }
    // The exponent's bias differs by 112; the product is exact, for subnormal halves too.
    const uint32_t bits = magnitude << 13;
    std::memcpy(&value, &bits, 4);
    value *= 0x1p112f;
    return sign != 0 ? -value : value;
}

// Reads source elements as f32 and stores them as T. Element (row, k) of the target is at start +
// row * row_stride + k * column_stride of the source.
template <Source source, class T>
struct Convert {
    const void* data;
    float offset;
    int64_t start, row_stride, column_stride;

    T operator()(int64_t row, int64_t k) const {
        return element(start + row * row_stride + k * column_stride);
    }

    T element(int64_t index) const {
        float value;
        if constexpr (source == Source::f32) {
            std::memcpy(&value, static_cast<const char*>(data) + index * 4, 4);
        } else {
            uint16_t bits;
            std::memcpy(&bits, static_cast<const char*>(data) + index * 2, 2);
            if constexpr (source == Source::bf16) {
                if constexpr (sizeof(T) == 2) {
                    if (offset == 0.0f) return bf16{bits};
                }
                value = widen(bf16{bits});
            } else {
                value = widen_half(bits);
            }
        }
        if (offset != 0.0f) value += offset;
        if constexpr (sizeof(T) == 4) {
            return value;
        } else {
            return round_bf16(value);
        }
    }

    // The stored bytes are the source's bytes, row after row.
    bool verbatim() const {
        return offset == 0.0f && source == (sizeof(T) == 4 ? Source::f32 : Source::bf16) &&
               column_stride == 1;
    }

    const char* at(int64_t row, int64_t k) const {
        const int64_t index = start + row * row_stride + k * column_stride;
        return static_cast<const char*>(data) + index * (source == Source::f32 ? 4 : 2);
    }
};

// Offset of element (row, k) of a panel matrix, in elements from the panel's start.
template <class T>
int64_t panel_index(int64_t lane, int64_t k) {
    if constexpr (sizeof(T) == 4) {
        return k * kPanel + lane;
    } else {
        return (k / 2 * kPanel + lane) * 2 + k % 2;
    }
}

// Transposes `rows` (<= kPanel) source rows of `words` 4-byte words into columns of a panel: word w
// of row r goes to out[w * kPanel + r]. A word is an f32 or a pair of bf16, so this serves both
// layouts.
void turn_words(const char* source, int64_t stride_bytes, int64_t rows, int64_t words,
                uint32_t* out) {
    int64_t row = 0;
#if defined(__SSE2__)
    for (; row + 4 <= rows; row += 4) {
        const char* from = source + row * stride_bytes;
        uint32_t* to = out + row;
        int64_t w = 0;
        for (; w + 4 <= words; w += 4) {
            __m128i in[4];
            for (int i = 0; i < 4; ++i) {
                in[i] = _mm_loadu_si128(
                    reinterpret_cast<const __m128i*>(from + i * stride_bytes + w * 4));
            }
            const __m128i a = _mm_unpacklo_epi32(in[0], in[1]);
            const __m128i b = _mm_unpacklo_epi32(in[2], in[3]);
            const __m128i c = _mm_unpackhi_epi32(in[0], in[1]);
            const __m128i d = _mm_unpackhi_epi32(in[2], in[3]);
            const __m128i turned[4] = {_mm_unpacklo_epi64(a, b), _mm_unpackhi_epi64(a, b),
                                       _mm_unpacklo_epi64(c, d), _mm_unpackhi_epi64(c, d)};
            for (int i = 0; i < 4; ++i) {
                _mm_storeu_si128(reinterpret_cast<__m128i*>(to + (w + i) * kPanel), turned[i]);
            }
        }
        for (; w < words; ++w) {
            for (int64_t i = 0; i < 4; ++i) {
                std::memcpy(to + w * kPanel + i, from + i * stride_bytes + w * 4, 4);
            }
        }
    }
#endif
    for (; row < rows; ++row) {
        for (int64_t w = 0; w < words; ++w) {
            std::memcpy(out + w * kPanel + row, source + row * stride_bytes + w * 4, 4);
        }
    }
}

// Rows first .. first + count as f32, transposed: element (row, k) goes to out[k * 32 + row -
// first].
template <class Read>
void turn_rows(const Read& read, int64_t first, int64_t count, int64_t columns, float* out) {
    if (read.column_stride != 1) {  // rows lie side by side already
        for (int64_t k = 0; k < columns; ++k) {
            for (int64_t row = 0; row < count; ++row) {
                out[k * kIntLanes + row] = read(first + row, k);
            }
        }
        return;
    }
    alignas(64) float widened[kIntLanes][kColumnBlock];
    for (int64_t k0 = 0; k0 < columns; k0 += kColumnBlock) {
        const int64_t width = columns - k0 < kColumnBlock ? columns - k0 : kColumnBlock;
        for (int64_t row = 0; row < count; ++row) {
            const int64_t source = read.start + (first + row) * read.row_stride + k0;
            for (int64_t k = 0; k < width; ++k) widened[row][k] = read.element(source + k);
        }
        turn_words(reinterpret_cast<const char*>(widened), kColumnBlock * 4, count, width,
                   reinterpret_cast<uint32_t*>(out + k0 * kIntLanes));
    }
}

// Fills units 0 .. units in parts, each after its share of the source was digested, so that both
// reads share the caches. content null: nothing is digested.
template <class Part>
void deal_with_digest(Pool& pool, Content* content, int64_t units, Part part) {
    const int64_t pieces = content == nullptr ? (units < kShares ? units : kShares)
                                              : content->pieces();
    pool.deal(pieces, 1, [&](int64_t begin, int64_t end, int) {
        for (int64_t i = begin; i < end; ++i) {
            if (content != nullptr) content->take(i);
            part(units * i / pieces, units * (i + 1) / pieces);
        }
    });
}

template <class T, class Read>
void fill_panels(Pool& pool, Content* content, char* data, Type type, int64_t first,
                 int64_t count, int64_t columns, Read read) {
    const int64_t bytes = panel_bytes(columns, type);
    const int64_t first_panel = first / kPanel;
    const int64_t panels = (first + count - 1) / kPanel - first_panel + 1;
    deal_with_digest(pool, content, panels, [&](int64_t begin, int64_t end) {
        for (int64_t p = first_panel + begin; p < first_panel + end; ++p) {
            T* panel = reinterpret_cast<T*>(data + p * bytes);
            const int64_t low = p * kPanel > first ? p * kPanel : first;
            const int64_t high = (p + 1) * kPanel < first + count ? (p + 1) * kPanel
                                                                 : first + count;
            for (int64_t k0 = 0; k0 < columns; k0 += kColumnBlock) {
                const int64_t k1 = k0 + kColumnBlock < columns ? k0 + kColumnBlock : columns;
                int64_t start = k0;
                if (read.verbatim()) {  // whole words; an odd last column is handled below
                    const int64_t words = (k1 - k0) * int64_t{sizeof(T)} / 4;
                    start += words * 4 / int64_t{sizeof(T)};
                    turn_words(read.at(low - first, k0),
                               read.row_stride * int64_t{sizeof(T)}, high - low, words,
                               reinterpret_cast<uint32_t*>(
                                   panel + panel_index<T>(low - p * kPanel, k0)));
                }
                if (read.column_stride != 1) {  // rows lie side by side, as panels need them
                    for (int64_t k = k0; k < k1; ++k) {
                        for (int64_t row = low; row < high; ++row) {
                            panel[panel_index<T>(row - p * kPanel, k)] = read(row - first, k);
                        }
                    }
                    continue;
                }
                for (int64_t row = low; start < k1 && row < high; ++row) {
                    const int64_t source = read.start + (row - first) * read.row_stride;
                    const int64_t lane = row - p * kPanel;
                    for (int64_t k = start; k < k1; ++k) {
                        panel[panel_index<T>(lane, k)] = read.element(source + k);
                    }
                }
            }
        }
    });
}

// Like fill_panels, for a matrix of integers: a panel's rows are widened to f32 and transposed in
// the thread's scratch, then quantized.
template <class Read>
void fill_ints(Pool& pool, Content* content, char* data, const IntScheme& scheme,
               int64_t* coarse_rows, int64_t first, int64_t count, int64_t columns, Read read) {
    const int64_t bytes = int_panel_bytes(columns, scheme);
    const int64_t first_panel = first / kIntLanes;
    const int64_t panels = (first + count - 1) / kIntLanes - first_panel + 1;
    const int64_t pieces = content == nullptr ? (panels < kShares ? panels : kShares)
                                              : content->pieces();
    pool.deal(pieces, 1, [&](int64_t begin, int64_t end, int thread) {
        auto* turned = reinterpret_cast<float*>(
            pool.scratch(thread, columns * kIntLanes * int64_t{sizeof(float)}));
        for (int64_t i = begin; i < end; ++i) {
            if (content != nullptr) content->take(i);
            for (int64_t p = first_panel + panels * i / pieces;
                 p < first_panel + panels * (i + 1) / pieces; ++p) {
                const int64_t start = p * kIntLanes;
                const int64_t low = start > first ? start : first;
                const int64_t high = start + kIntLanes < first + count ? start + kIntLanes
                                                                       : first + count;
                if (high - low < kIntLanes) {
                    std::memset(turned, 0, static_cast<size_t>(columns * kIntLanes) * 4);
                }
                turn_rows(read, low - first, high - low, columns, turned + low - start);
                pool.kernels().pack_ints(
                    {turned, columns, scheme, data + p * bytes, low - start, high - start,
                     coarse_rows});
            }
        }
    });
}

template <class T, class Read>
void fill_rows(Pool& pool, Content* content, char* data, int64_t first, int64_t count,
               int64_t columns, Read read) {
    T* out = reinterpret_cast<T*>(data) + first * columns;
    deal_with_digest(pool, content, count * columns, [&](int64_t begin, int64_t end) {
        if (read.row_stride == columns) {
            for (int64_t i = begin; i < end; ++i) out[i] = read.element(read.start + i);
            return;
        }
        for (int64_t i = begin; i < end; ++i) out[i] = read(i / columns, i % columns);
    });
}

}  // namespace

Weight::Weight(Form form, Type type, int64_t rows, int64_t columns, IntScheme ints)
    : form_(form), type_(form == Form::vector ? Type::f32 : type), rows_(rows),
      columns_(form == Form::vector ? 1 : columns), ints_(ints) {
    if (rows_ < 1 || columns_ < 1) {
        throw std::invalid_argument("a weight of " + std::to_string(rows_) + " x " +
                                    std::to_string(columns_) + " elements");
    }
    if (has_ints() && form != Form::matrix) {
        throw std::invalid_argument("only a matrix can be of integers");
    }
    memory_ = Memory(static_cast<std::size_t>(packed_size()));
}

Weight::Weight(Form form, Type type, int64_t rows, int64_t columns, IntScheme ints,
               const char* packed, int64_t bytes)
    : Weight(form, type, rows, columns, ints) {
    if (bytes != packed_size() || reinterpret_cast<std::uintptr_t>(packed) % 64 != 0) {
        throw std::invalid_argument("packed bytes: " + std::to_string(bytes) + "; " +
                                    std::to_string(packed_size()) + " are needed, aligned to 64");
    }
    memory_ = Memory::borrowed(packed, static_cast<std::size_t>(bytes));
}

Weight::Weight(Form form, Type type, int64_t rows, int64_t columns, IntScheme ints,
               std::shared_ptr<WeightStream> stream, int64_t range)
    : Weight(form, type, rows, columns, ints, stream->data(range), stream->bytes(range)) {
    stream_ = std::move(stream);
    range_ = range;
}

int64_t Weight::packed_size() const {
    if (has_ints()) return int_packed_bytes(rows_, columns_, ints_);
    if (form_ == Form::matrix) return packed_bytes(rows_, columns_, type_);
    return rows_ * columns_ * type_bytes(type_);
}

void Weight::fill(Pool& pool, int64_t first, int64_t count, const SourceRows& source,
                  float offset) {
    if (memory_.is_borrowed()) throw std::logic_error("this weight was packed before");
    if (source.first_row < 0 || source.first_row + count > source.of_rows) {
        throw std::out_of_range("rows " + std::to_string(source.first_row) + " to " +
                                std::to_string(source.first_row + count) + " of a source of " +
                                std::to_string(source.of_rows));
    }
    if (first < 0 || count < 0 || first + count > rows_) {
        throw std::out_of_range("rows " + std::to_string(first) + " to " +
                                std::to_string(first + count) + " of a weight of " +
                                std::to_string(rows_));
    }
    if (count == 0) {
        for (int64_t i = 0; source.content != nullptr && i < source.content->pieces(); ++i) {
            source.content->take(i);
        }
        return;
    }
    const auto fill_with = [&](auto read, auto* element) {
        using T = std::remove_pointer_t<decltype(element)>;
        if (has_ints()) {
            if constexpr (sizeof(T) == 4) {
                fill_ints(pool, source.content, memory_.data(), ints_, &coarse_rows_, first, count,
                          columns_, read);
            }
        } else if (form_ == Form::matrix) {
            fill_panels<T>(pool, source.content, memory_.data(), type_, first, count, columns_, read);
        } else {
            fill_rows<T>(pool, source.content, memory_.data(), first, count, columns_, read);
        }
    };
    const int64_t row_stride = source.transposed ? 1 : columns_;
    const int64_t column_stride = source.transposed ? source.of_rows : 1;
    const auto fill_from = [&](auto read, auto* element) {
        read.data = source.bytes;
        read.offset = offset;
        read.start = source.first_row * row_stride;
        read.row_stride = row_stride;
        read.column_stride = column_stride;
        fill_with(read, element);
    };
    const auto fill_as = [&](auto* element) {
        using T = std::remove_pointer_t<decltype(element)>;
        switch (source.type) {
            case Source::f32: return fill_from(Convert<Source::f32, T>{}, element);
            case Source::f16: return fill_from(Convert<Source::f16, T>{}, element);
            case Source::bf16: return fill_from(Convert<Source::bf16, T>{}, element);
        }
    };
    if (type_ == Type::f32 || has_ints()) {
        fill_as(static_cast<float*>(nullptr));
    } else {
        fill_as(static_cast<bf16*>(nullptr));
    }
}

std::vector<float> Weight::row(int64_t row) const {
    if (stream_) throw std::logic_error("the rows of this weight are in a file");
    if (row < 0 || row >= rows_) throw std::out_of_range("row " + std::to_string(row));
    std::vector<float> values(static_cast<std::size_t>(columns_));
    for (int64_t k = 0; k < columns_; ++k) {
        const char* data = memory_.data();
        int64_t index = row * columns_ + k;
        if (has_ints()) {
            data += row / kIntLanes * int_panel_bytes(columns_, ints_);
            values[static_cast<std::size_t>(k)] =
                int_element(data, columns_, ints_, row % kIntLanes, k);
            continue;
        }
        if (form_ == Form::matrix) {
            data += row / kPanel * panel_bytes(columns_, type_);
            index = type_ == Type::f32 ? panel_index<float>(row % kPanel, k)
                                       : panel_index<bf16>(row % kPanel, k);
        }
        values[static_cast<std::size_t>(k)] =
            type_ == Type::f32 ? reinterpret_cast<const float*>(data)[index]
                               : widen(reinterpret_cast<const bf16*>(data)[index]);
    }
    return values;
}

}  // namespace quire

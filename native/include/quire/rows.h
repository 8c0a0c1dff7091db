// Shared code of the row-wise kernels: chunk sizes and dispatch on storage types. Only for files
// compiled once per instruction set. A chunk is whole rows, so the distribution of rows cannot
// change a result; no load passes the last column.
#pragma once

#include "quire/kernels.h"
#include "quire/vec.h"

namespace quire::QUIRE_ISA_NS {

// Rows per chunk: at least some 8 thousand elements, so that small work stays on the calling
// thread.
QUIRE_VEC int64_t rows_per_chunk(int64_t width) { return width < 8192 ? 8192 / width : 1; }

// Calls body with a null pointer of the element type of `type`.
template <class Body>
QUIRE_VEC void with_type(Type type, Body body) {
    if (type == Type::f32) {
        body(static_cast<float*>(nullptr));
    } else {
        body(static_cast<bf16*>(nullptr));
    }
}

// body(column, n) for steps of kLanes columns, n < kLanes in the last one.
template <class Body>
QUIRE_VEC void for_columns(int64_t width, Body body) {
    int64_t c = 0;
    for (; c + kLanes <= width; c += kLanes) body(c, kLanes);
    if (c < width) body(c, static_cast<int>(width - c));
}

// Whole or first n lanes.
template <class T>
QUIRE_VEC Vec load_some(const T* p, int n) {
    return n == kLanes ? load(p) : load_n(p, n);
}
template <class T>
QUIRE_VEC void store_some(T* p, Vec a, int n) {
    if (n == kLanes) {
        store(p, a);
    } else {
        store_n(p, a, n);
    }
}

}  // namespace quire::QUIRE_ISA_NS

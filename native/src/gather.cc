// embed and gather_rows: rows selected by index. An embedding that is also the head is stored in
// panels, where row n is lane n % 32 of panel n / 32. Values are only rounded to y's type (integers
// are multiplied by their scale); indices were checked by the interpreter.

#include "quire/rows.h"

namespace quire::QUIRE_ISA_NS {

namespace {

// Element k of lane `lane` of a panel.
QUIRE_VEC float panel_element(const float* panel, int64_t lane, int64_t k) {
    return panel[k * kPanel + lane];
}
QUIRE_VEC float panel_element(const bf16* panel, int64_t lane, int64_t k) {
    return widen(panel[(k / 2 * kPanel + lane) * 2 + k % 2]);
}

// `tag` only selects the weight's element type.
template <class W, class Y>
QUIRE_VEC void embed_row(const EmbedArgs& args, int64_t index, W* tag, Y* y) {
    (void)tag;
    const int64_t k = args.weight.k;
    float values[kLanes] = {};
    if (args.packed) {
        const auto* panel = reinterpret_cast<const W*>(
            static_cast<const char*>(args.weight.data) +
            index / kPanel * panel_bytes(k, args.weight.type));
        for_columns(k, [&](int64_t c, int n) {
            for (int i = 0; i < n; ++i) values[i] = panel_element(panel, index % kPanel, c + i);
            store_some(y + c, load(values), n);
        });
        return;
    }
    const W* row = static_cast<const W*>(args.weight.data) + index * k;
    for_columns(k, [&](int64_t c, int n) { store_some(y + c, load_some(row + c, n), n); });
}

}  // namespace

void embed(const EmbedArgs& args) {
    args.pool->deal(args.rows, rows_per_chunk(args.weight.k), [&](int64_t begin, int64_t end, int) {
        for (int64_t row = begin; row < end; ++row) {
            with_type(args.weight.type, [&](auto* weight) {
                with_type(args.y.type, [&](auto* y) {
                    embed_row(args, args.ids[row], weight,
                              static_cast<decltype(y)>(args.y.at(row)));
                });
            });
        }
    });
}

void embed_ints(const EmbedIntsArgs& args) {
    const int64_t k = args.weight.k;
    const int64_t bytes = int_panel_bytes(k, args.weight.scheme);
    args.pool->deal(args.rows, rows_per_chunk(k), [&](int64_t begin, int64_t end, int) {
        for (int64_t row = begin; row < end; ++row) {
            const int64_t index = args.ids[row];
            const char* panel =
                static_cast<const char*>(args.weight.data) + index / kIntLanes * bytes;
            with_type(args.y.type, [&](auto* y) {
                auto* out = static_cast<decltype(y)>(args.y.at(row));
                for_columns(k, [&](int64_t c, int n) {
                    float values[kLanes] = {};
                    for (int i = 0; i < n; ++i) {
                        values[i] = int_element(panel, k, args.weight.scheme, index % kIntLanes,
                                                c + i);
                    }
                    store_some(out + c, load(values), n);
                });
            });
        }
    });
}

void gather_rows(const GatherRowsArgs& args) {
    const int64_t bytes = args.x.width * type_bytes(args.x.type);
    args.pool->deal(args.rows, rows_per_chunk(args.x.width), [&](int64_t begin, int64_t end, int) {
        for (int64_t row = begin; row < end; ++row) {
            __builtin_memcpy(args.y.at(row), args.x.at(args.index[row]),
                             static_cast<size_t>(bytes));
        }
    });
}

}  // namespace quire::QUIRE_ISA_NS

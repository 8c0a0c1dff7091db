// Bindings for the pool, weights and the interpreter. Every call that computes releases the GIL.
// Fields of operations are decoded by name, arrays become pointers (program.h). Lengths that must
// agree are checked here, because pointers lose them; the interpreter checks the content of arrays.
// Arrays passed to set_rope must outlive the program.

#include "compute_time.h"
#include "quire/program.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "quire/isa.h"
#include "quire/weight_stream.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using Int32s = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Table = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using MutableBytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using View = std::tuple<int64_t, int64_t, int64_t>;

quire::Type type_named(const std::string& name) {
    if (name == "f32") return quire::Type::f32;
    if (name == "bf16") return quire::Type::bf16;
    throw std::invalid_argument("dtype \"" + name + "\"; allowed are f32 and bf16");
}

quire::Source source_named(const std::string& name) {
    if (name == "f32") return quire::Source::f32;
    if (name == "f16") return quire::Source::f16;
    if (name == "bf16") return quire::Source::bf16;
    throw std::invalid_argument("source dtype \"" + name + "\"; allowed are f32, f16 and bf16");
}

quire::Form form_named(const std::string& name) {
    if (name == "matrix") return quire::Form::matrix;
    if (name == "table") return quire::Form::table;
    if (name == "vector") return quire::Form::vector;
    throw std::invalid_argument("weight form \"" + name + "\"");
}

// "int8", or "int4-gGROUP" with or without "-zp"; "" is no scheme.
quire::IntScheme scheme_named(const std::string& name) {
    if (name.empty()) return {};
    if (name == "int8") return {8, 0, false};
    for (int group : {32, 64, 128}) {
        const std::string plain = "int4-g" + std::to_string(group);
        if (name == plain) return {4, group, false};
        if (name == plain + "-zp") return {4, group, true};
    }
    throw std::invalid_argument("weight scheme \"" + name + "\"");
}

void bind_pool(nb::module_& module) {
    nb::class_<quire::Pool>(module, "Pool",
                            "Threads that compute, and the instruction set they use.\n\n"
                            "The calling thread is one of num_threads. isa \"\": QUIRE_ISA, else "
                            "the best of this machine.")
        .def("__init__",
             [](quire::Pool* self, int num_threads, const std::string& isa) {
                 new (self) quire::Pool(num_threads, quire::kernels_for(isa));
             },
             "num_threads"_a, nb::kw_only(), "isa"_a = "")
        .def("deal",
             [](quire::Pool& self, int64_t n, const nb::callable& body) {
                 nb::gil_scoped_release release;
                 self.deal(n, 1, [&](int64_t begin, int64_t end, int thread) {
                     nb::gil_scoped_acquire acquire;
                     body(begin, end, thread);
                 });
             },
             "n"_a, "body"_a, "body(begin, end, thread) over 0 .. n, chunks of one (for tests).")
        .def_prop_ro("num_threads", &quire::Pool::num_threads)
        .def_prop_ro("num_forks", &quire::Pool::num_forks,
                     "How often work was handed to more than the calling thread.")
        .def_prop_ro("isa", [](const quire::Pool& self) { return self.kernels().isa; });
}

nb::object packed_of(nb::handle self) {
    const auto& weight = nb::cast<const quire::Weight&>(self);
    if (weight.stream() != nullptr) {
        throw std::invalid_argument("the bytes of this weight are in a file");
    }
    const size_t shape[1] = {static_cast<size_t>(weight.bytes())};
    return nb::cast(nb::ndarray<nb::numpy, const uint8_t, nb::ndim<1>>(weight.data(), 1, shape,
                                                                       self));
}

void bind_weight_stream(nb::module_& module) {
    nb::class_<quire::WeightStream>(module, "WeightStream",
                                    "Ranges of a file that are read ahead, in their order, over "
                                    "and over: see native/include/quire/weight_stream.h.")
        .def("__init__",
             [](quire::WeightStream* self, int descriptor,
                const std::vector<std::tuple<int64_t, int64_t>>& ranges, int64_t window_bytes,
                bool is_direct) {
                 std::vector<quire::WeightStream::Range> all;
                 for (const auto& [offset, bytes] : ranges) all.push_back({offset, bytes});
                 new (self) quire::WeightStream(descriptor, std::move(all), window_bytes,
                                                is_direct);
             },
             "descriptor"_a, "ranges"_a, "window_bytes"_a, nb::kw_only(), "is_direct"_a,
             "ranges: (offset, bytes) each. is_direct: the file was opened with O_DIRECT.")
        .def("read",
             [](quire::WeightStream& self, int64_t range) {
                 std::string why;
                 {
                     nb::gil_scoped_release release;
                     why = self.acquire(range, [] { return false; });
                 }
                 if (!why.empty()) throw quire::Aborted(why);
                 const nb::bytes content(self.data(range),
                                         static_cast<size_t>(self.bytes(range)));
                 self.release(range);
                 return content;
             },
             "range"_a, "The bytes of a range (for tests). Raises Aborted where it is not read.")
        .def_prop_ro("bytes_read", &quire::WeightStream::bytes_read)
        .def_prop_ro("waited_s",
                     [](const quire::WeightStream& self) { return 1e-9 * static_cast<double>(
                                                               self.waited_ns()); },
                     "Seconds that steps waited for bytes.")
        .def_prop_ro("bytes_held", &quire::WeightStream::bytes_held, "In memory, or being read.");
}

void bind_weight(nb::module_& module) {
    nb::class_<quire::Weight>(module, "Weight", "A weight in the kernels' layout.")
        .def("__init__",
             [](quire::Weight* self, const std::string& form, const std::string& dtype,
                int64_t rows, int64_t columns, const std::string& scheme) {
                 new (self) quire::Weight(form_named(form), type_named(dtype), rows, columns,
                                          scheme_named(scheme));
             },
             "form"_a, "dtype"_a, "rows"_a, "columns"_a, "scheme"_a = "")
        .def("__init__",
             [](quire::Weight* self, const std::string& form, const std::string& dtype,
                int64_t rows, int64_t columns, const std::string& scheme, const Bytes& packed) {
                 new (self) quire::Weight(form_named(form), type_named(dtype), rows, columns,
                                          scheme_named(scheme),
                                          reinterpret_cast<const char*>(packed.data()),
                                          static_cast<int64_t>(packed.size()));
             },
             "form"_a, "dtype"_a, "rows"_a, "columns"_a, "scheme"_a, "packed"_a,
             nb::keep_alive<1, 7>(),
             "packed: uint8 [num_bytes] that `packed` of such a weight gave, aligned to 64 and "
             "followed by 64 readable bytes; used where it lies.")
        .def("__init__",
             [](quire::Weight* self, const std::string& form, const std::string& dtype,
                int64_t rows, int64_t columns, const std::string& scheme,
                const std::shared_ptr<quire::WeightStream>& stream, int64_t range) {
                 new (self) quire::Weight(form_named(form), type_named(dtype), rows, columns,
                                          scheme_named(scheme), stream, range);
             },
             "form"_a, "dtype"_a, "rows"_a, "columns"_a, "scheme"_a, "stream"_a, "range"_a,
             "One that a stream reads for each use.")
        .def("fill",
             [](quire::Weight& self, quire::Pool& pool, int64_t first, int64_t count,
                const Bytes& source, const std::string& source_dtype, float offset,
                int64_t first_row, int64_t of_rows, bool transposed, bool digested) -> nb::object {
                 const quire::Source type = source_named(source_dtype);
                 const int64_t rows = of_rows > 0 ? of_rows : count;
                 const int64_t needed = rows * self.columns() * quire::source_bytes(type);
                 if (count < 0 || static_cast<int64_t>(source.size()) != needed) {
                     throw std::invalid_argument(
                         std::to_string(source.size()) + " source bytes; " +
                         std::to_string(rows) + " rows take " + std::to_string(needed));
                 }
                 quire::Content content(source.data(), needed);
                 {
                     nb::gil_scoped_release release;
                     self.fill(pool, first, count,
                               {source.data(), type, first_row, rows, transposed,
                                digested ? &content : nullptr},
                               offset);
                 }
                 if (!digested) return nb::none();
                 const quire::Digest digest = content.digest();
                 return nb::make_tuple(digest.low, digest.high);
             },
             "pool"_a, "first"_a, "count"_a, "source"_a, "source_dtype"_a, "offset"_a = 0.0f,
             nb::kw_only(), "first_row"_a = 0, "of_rows"_a = 0, "transposed"_a = false,
             "digested"_a = true,
             "Convert rows first .. first + count from the raw bytes of a tensor.\n\n"
             "They are its rows first_row .. of `of_rows` (0: count); it is [of_rows, columns], or "
             "[columns, of_rows] where transposed. Returns the content_digest of the whole source, "
             "which is read once for both; None where it is not to be digested.")
        .def("row", &quire::Weight::row, "row"_a, "One row as floats, for checks.")
        .def_prop_ro("rows", &quire::Weight::rows)
        .def_prop_ro("columns", &quire::Weight::columns)
        .def_prop_ro("num_bytes", &quire::Weight::bytes)
        .def_prop_ro("coarse_rows", &quire::Weight::coarse_rows,
                     "Rows it was filled with that 8 bits are too coarse for: see "
                     "quire/quant/int_weights.py.")
        .def_prop_ro("stream",
                     [](const quire::Weight& self) { return self.shared_stream(); },
                     "The WeightStream that reads it, or None.")
        .def_prop_ro("packed", &packed_of, "All bytes as they lie, a read-only view.");
    module.attr("PACKED_LAYOUT") = quire::kPackedLayout;
}

quire::ViewSpec view_of(const View& view) {
    return {std::get<0>(view), std::get<1>(view), std::get<2>(view)};
}

// ---- operations: dictionaries of fields by name

// A field's type as quire/program/operation.py names it; "?" marks an optional one.
template <class T>
struct TypeName {
    static std::string text() {
        static_assert(std::is_enum_v<T>);
        std::string text;
        for (const char* name : quire::Names<T>::all) text += (text.empty() ? "" : "|") + std::string(name);
        return text;
    }
};
template <>
struct TypeName<quire::ViewSpec> {
    static std::string text() { return "view"; }
};
template <>
struct TypeName<quire::WeightRef> {
    static std::string text() { return "weight"; }
};
template <>
struct TypeName<int64_t> {
    static std::string text() { return "int"; }
};
template <>
struct TypeName<std::vector<uint64_t>> {
    static std::string text() { return "ints"; }
};
template <>
struct TypeName<double> {
    static std::string text() { return "float"; }
};
template <class T>
struct TypeName<std::optional<T>> {
    static std::string text() { return TypeName<T>::text() + "?"; }
};

// Sets a field from Python. Throws std::bad_cast, nb::cast_error or std::invalid_argument.
template <class T>
void decode(nb::handle value, T& field) {
    if constexpr (std::is_enum_v<T>) {
        const auto name = nb::cast<std::string>(value);
        int32_t index = 0;
        for (const char* known : quire::Names<T>::all) {
            if (name == known) {
                field = static_cast<T>(index);
                return;
            }
            ++index;
        }
        throw std::invalid_argument("\"" + name + "\"; allowed are " + TypeName<T>::text());
    } else {
        field = nb::cast<T>(value);
    }
}
void decode(nb::handle value, quire::ViewSpec& field) { field = view_of(nb::cast<View>(value)); }
void decode(nb::handle value, quire::WeightRef& field) {
    field = nb::cast<std::shared_ptr<quire::Weight>>(value);
    if (field == nullptr) throw std::invalid_argument("None");
}
template <class T>
void decode(nb::handle value, std::optional<T>& field) {
    if (value.is_none()) return field.reset();
    T given{};
    decode(value, given);
    field = std::move(given);
}

template <class Op>
quire::Operation decoded(const nb::dict& fields) {
    Op op{};
    size_t used = 0;
    Op::fields(op, [&](const char* name, auto& field) {
        using Field = std::decay_t<decltype(field)>;
        const std::string what = std::string(Op::kind) + ": field \"" + name + "\" ";
        if (!fields.contains(name)) throw std::invalid_argument(what + "is missing");
        ++used;
        try {
            decode(fields[name], field);
        } catch (const std::bad_cast&) {
            throw std::invalid_argument(what + "is no " + TypeName<Field>::text());
        } catch (const std::invalid_argument& error) {
            throw std::invalid_argument(what + "is " + error.what());
        }
    });
    if (used != fields.size()) {
        throw std::invalid_argument(std::string(Op::kind) + ": " + std::to_string(fields.size()) +
                                    " fields; it has " + std::to_string(used));
    }
    return op;
}

// Calls visit(Op{}) for each kind of operation.
template <class Visit, class... Ops>
void each_kind(Visit&& visit, const std::variant<Ops...>*) {
    (visit(Ops{}), ...);
}
template <class Visit>
void each_kind(Visit&& visit) {
    each_kind(visit, static_cast<const quire::Operation*>(nullptr));
}

quire::Operation decoded(const std::string& kind, const nb::dict& fields) {
    std::optional<quire::Operation> found;
    each_kind([&](auto op) {
        using Op = decltype(op);
        if (kind == Op::kind) found = decoded<Op>(fields);
    });
    if (!found) throw std::invalid_argument("no operation is called \"" + kind + "\"");
    return *found;
}

// {kind: {field: type}}.
nb::dict operation_table() {
    nb::dict table;
    each_kind([&](auto op) {
        nb::dict fields;
        op.fields(op, [&](const char* name, auto& field) {
            fields[name] = TypeName<std::decay_t<decltype(field)>>::text();
        });
        table[op.kind] = fields;
    });
    return table;
}

void add_segment(quire::Program& self,
                 const std::vector<std::tuple<std::string, nb::dict>>& ops) {
    std::vector<quire::Operation> operations;
    for (const auto& [kind, fields] : ops) operations.push_back(decoded(kind, fields));
    self.add_segment(std::move(operations));
}

quire::StepInputs inputs_of(const Int32s& token_ids, const Int32s& positions,
                            const Int32s& rope_positions, const Int32s& kv_slots,
                            const Int32s& seq_starts, const Table& block_tables,
                            const Int32s& sample_rows, bool keeps_taps) {
    const size_t tokens = token_ids.size(), sequences = block_tables.shape(0);
    if (positions.size() != tokens || rope_positions.size() != tokens ||
        kv_slots.size() != tokens || seq_starts.size() != sequences + 1) {
        throw std::invalid_argument("the batch's arrays differ in length");
    }
    quire::StepInputs inputs;
    inputs.num_tokens = static_cast<int64_t>(tokens);
    inputs.num_samples = static_cast<int64_t>(sample_rows.size());
    inputs.num_sequences = static_cast<int64_t>(sequences);
    inputs.table_columns = static_cast<int64_t>(block_tables.shape(1));
    inputs.token_ids = token_ids.data();
    inputs.positions = positions.data();
    inputs.rope_positions = rope_positions.data();
    inputs.kv_slots = kv_slots.data();
    inputs.seq_starts = seq_starts.data();
    inputs.block_tables = block_tables.data();
    inputs.sample_rows = sample_rows.data();
    inputs.keeps_taps = keeps_taps;
    return inputs;
}

void run(quire::Program& self, int64_t segment, const Int32s& token_ids, const Int32s& positions,
         const Int32s& rope_positions, const Int32s& kv_slots, const Int32s& seq_starts,
         const Table& block_tables, const Int32s& sample_rows, bool keeps_taps,
         const std::optional<Floats>& features, int64_t then) {
    quire::StepInputs inputs = inputs_of(token_ids, positions, rope_positions, kv_slots,
                                         seq_starts, block_tables, sample_rows, keeps_taps);
    if (features) {
        if (features->shape(0) != token_ids.size()) {
            throw std::invalid_argument("features have not a row for each token");
        }
        inputs.features = features->data();
        inputs.feature_columns = static_cast<int64_t>(features->shape(1));
    }
    nb::gil_scoped_release release;
    const ComputeTime counted;
    self.run(segment, inputs);
    if (then >= 0) self.run(then, inputs);
}

void run_layers(quire::Program& self, int64_t segment, const Int32s& token_ids,
                const Int32s& positions, const Int32s& rope_positions, const Int32s& kv_slots,
                const Int32s& seq_starts, const Table& block_tables, const Int32s& sample_rows,
                int64_t first, int64_t end, bool keeps_taps) {
    const quire::StepInputs inputs = inputs_of(token_ids, positions, rope_positions, kv_slots,
                                               seq_starts, block_tables, sample_rows, keeps_taps);
    nb::gil_scoped_release release;
    const ComputeTime counted;
    self.run_layers(segment, inputs, first, end);
}

// A NumPy view [rows, width] of a buffer: float32, or uint16 holding bf16.
nb::object array_of(nb::handle self_handle, const View& view, int64_t rows) {
    auto& self = nb::cast<quire::Program&>(self_handle);
    const quire::ViewSpec spec = view_of(view);
    const quire::Rows data = self.rows(spec);
    if (rows < 0 || rows > self.max_rows(spec.buffer)) {
        throw std::invalid_argument(std::to_string(rows) + " rows of a buffer of " +
                                    std::to_string(self.max_rows(spec.buffer)));
    }
    const size_t shape[2] = {static_cast<size_t>(rows), static_cast<size_t>(data.width)};
    const int64_t strides[2] = {data.stride, 1};
    if (data.type == quire::Type::f32) {
        return nb::cast(nb::ndarray<nb::numpy, float, nb::ndim<2>>(
            static_cast<float*>(data.data), 2, shape, self_handle, strides));
    }
    return nb::cast(nb::ndarray<nb::numpy, uint16_t, nb::ndim<2>>(
        static_cast<uint16_t*>(data.data), 2, shape, self_handle, strides));
}

void bind_interpreter(nb::module_& module) {
    nb::class_<quire::Program>(module, "Program",
                               "Buffers, operations and cache of one model, and their runs.")
        .def(nb::init<std::shared_ptr<quire::Pool>, int64_t, int64_t>(), "pool"_a, "arena_bytes"_a,
             "apart_bytes"_a = 0, "apart_bytes: of a second arena, for run_layers.")
        .def("add_buffer",
             [](quire::Program& self, int rows, int64_t offset_bytes, int64_t stride,
                int64_t max_rows, const std::string& dtype, bool apart) {
                 const quire::BufferSpec buffer{static_cast<quire::RowCount>(rows), offset_bytes,
                                                stride, max_rows, type_named(dtype)};
                 apart ? self.add_buffer_apart(buffer) : self.add_buffer(buffer);
             },
             "rows"_a, "offset_bytes"_a, "stride"_a, "max_rows"_a, "dtype"_a, "apart"_a = false,
             "apart: in the second arena, which has the same buffers as the first.")
        .def("add_segment", &add_segment, "ops"_a,
             "ops: (kind, {field: value}) each, with the fields that OPERATIONS lists; a view is "
             "(buffer, offset, width).")
        .def("set_rope",
             [](quire::Program& self, int64_t index, const Floats& cos, const Floats& sin) {
                 if (cos.shape(0) != sin.shape(0) || cos.shape(1) != sin.shape(1)) {
                     throw std::invalid_argument("cos and sin differ in shape");
                 }
                 self.set_rope(index, cos.data(), sin.data(),
                               static_cast<int64_t>(cos.shape(0)),
                               static_cast<int64_t>(cos.shape(1)));
             },
             "index"_a, "cos"_a, "sin"_a, "The caller keeps the arrays alive.")
        .def("allocate_cache",
             [](quire::Program& self, const std::string& dtype, int kv_heads, int head_dim,
                int block_size, int64_t layers, int64_t num_blocks, bool ints) {
                 self.allocate_cache({type_named(dtype), kv_heads, head_dim, block_size, ints},
                                     layers, num_blocks);
             },
             nb::kw_only(), "dtype"_a, "kv_heads"_a, "head_dim"_a, "block_size"_a, "layers"_a,
             "num_blocks"_a, "ints"_a = false,
             "dtype: of queries, keys and values. ints: keep them as int8 with a scale a row.")
        .def("place_cache",
             [](quire::Program& self, const MutableBytes& memory) {
                 self.place_cache(reinterpret_cast<char*>(memory.data()),
                                  static_cast<int64_t>(memory.size()));
             },
             "memory"_a,
             "Keep the KV pool in zero-filled memory, 64 bytes longer; the caller keeps it alive.")
        .def("share_cache", &quire::Program::share_cache, "other"_a, "layers"_a,
             "Use the first layers of another program's KV pool.")
        .def("copy_blocks",
             [](quire::Program& self, const Int32s& from, const Int32s& to) {
                 if (from.size() != to.size()) {
                     throw std::invalid_argument("copy_from and copy_to differ in length");
                 }
                 nb::gil_scoped_release release;
                 const ComputeTime counted;
                 self.copy_blocks(from.data(), to.data(), static_cast<int64_t>(from.size()));
             },
             "copy_from"_a, "copy_to"_a)
        .def("run", &run, "segment"_a, nb::kw_only(), "token_ids"_a, "positions"_a,
             "rope_positions"_a, "kv_slots"_a, "seq_starts"_a, "block_tables"_a, "sample_rows"_a,
             "keeps_taps"_a = false, "features"_a = nb::none(), "then"_a = -1,
             "keeps_taps: whether a tap is computed. features: what a feed reads. then: a segment "
             "that follows at once, on the same inputs; -1 none.")
        .def("run_layers", &run_layers, "segment"_a, nb::kw_only(), "token_ids"_a, "positions"_a,
             "rope_positions"_a, "kv_slots"_a, "seq_starts"_a, "block_tables"_a, "sample_rows"_a,
             "first"_a, "end"_a, "keeps_taps"_a = false,
             "Layers first .. end - 1 in the second arena, which keeps what is between layers.")
        .def("num_layers", &quire::Program::num_layers, "segment"_a)
        .def("set_group", &quire::Program::set_group, "group"_a,
             "The ranks that all_gather exchanges columns with.")
        .def("set_links", &quire::Program::set_links, "source"_a.none(), "target"_a.none(),
             "The links that recv and send move rows through; None for none.")
        .def("abort", &quire::Program::abort, "Stop the run in progress between two operations.")
        .def_prop_ro("ops_done", &quire::Program::ops_done)
        .def_prop_ro("pieces_read", &quire::Program::pieces_read,
                     "Pieces of the cache that attention read: 256 positions of a KV head each, "
                     "however many rows were computed with them.")
        .def_prop_ro("experts_read", &quire::Program::experts_read,
                     "Reads of an expert's weights so far; for many rows at once it is one.")
        .def_prop_ro("expert_loads", &quire::Program::expert_loads,
                     "For each operation with several experts, the rows that chose each so far.")
        .def("set_timed", &quire::Program::set_timed, "timed"_a,
             "Take the time of each unit from now on, beginning at zero; or no longer.")
        .def("units",
             [](const quire::Program& self, int64_t segment) {
                 std::vector<std::tuple<size_t, size_t, int64_t>> units;
                 for (const auto& unit : self.units(segment)) {
                     units.emplace_back(unit.first, unit.count, unit.nanoseconds);
                 }
                 return units;
             },
             "segment"_a,
             "What is computed as one: (first operation, how many, nanoseconds since set_timed).")
        .def("set_poison", &quire::Program::set_poison, "poison"_a,
             "Fill buffers with NaN before a segment writes them (for tests).")
        .def("array",
             [](nb::handle self, const View& view, int64_t rows) {
                 return array_of(self, view, rows);
             },
             "view"_a, "rows"_a, "A NumPy view [rows, width]; bf16 as uint16.")
        .def_prop_ro("cache",
                     [](nb::handle self_handle) {
                         auto& self = nb::cast<quire::Program&>(self_handle);
                         const size_t shape[1] = {static_cast<size_t>(self.cache_bytes())};
                         return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(
                             self.cache_data(), 1, shape, self_handle);
                     },
                     "The KV pool's bytes (for tests and tiers).");
}

}  // namespace

void bind_program(nb::module_& module) {
    bind_pool(module);
    bind_weight_stream(module);
    bind_weight(module);
    bind_interpreter(module);
    module.attr("OPERATIONS") = operation_table();
    module.attr("MAX_EXPERTS") = quire::kMaxExperts;
    module.def(
        "expert_bytes",
        [](int64_t rows, int64_t experts, int64_t top_k, int64_t hidden, int64_t inner,
           int64_t own, const std::string& dtype, int64_t num_threads, int64_t degree,
           int64_t share) {
            const quire::ExpertShape shape{rows, experts,           top_k,  hidden, inner,
                                           own,  type_named(dtype), degree, share};
            return quire::shared_expert_bytes(shape) +
                   num_threads * quire::expert_thread_bytes(shape);
        },
        "rows"_a, nb::kw_only(), "experts"_a, "top_k"_a, "hidden"_a, "inner"_a, "own"_a, "dtype"_a,
        "num_threads"_a, "degree"_a = 0, "share"_a = 0,
        "Bytes of scratch memory of an operation with experts.");
    module.def(
        "context_bytes",
        [](int64_t tokens, int64_t heads, int64_t head_dim, int64_t rank, int64_t degree) {
            const quire::Share own = quire::share_of(heads, 1, rank, degree);
            return quire::ContextRunner::bytes({tokens, heads, own.end - own.start, head_dim,
                                                degree});
        },
        "tokens"_a, nb::kw_only(), "heads"_a, "head_dim"_a, "rank"_a, "degree"_a,
        "Bytes of scratch memory of attention over the pieces of several ranks.");
    nb::exception<quire::Aborted>(module, "Aborted", PyExc_RuntimeError);
}

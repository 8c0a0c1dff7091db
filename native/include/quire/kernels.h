// The arguments of kernels, and the table through which they are called. Plain pointers and sizes
// only. Strides are in elements unless named `_bytes`. A kernel reads nothing past the last element
// of a row it is given (rows lie in larger buffers; their other columns may hold NaN) and writes
// only its output columns.
//
// The Row Rule: row i of a result depends on row i of the inputs only, bit for bit, whatever the
// number of rows or threads.
#pragma once

#include "quire/int_layout.h"
#include "quire/pool.h"
#include "quire/types.h"

namespace quire {

// `rows` rows of `width` elements; row r starts at data + r * stride elements.
struct Rows {
    void* data;
    int64_t stride;
    Type type;
    int64_t width;

    __attribute__((always_inline)) void* at(int64_t row) const {
        return static_cast<char*>(data) + row * stride * type_bytes(type);
    }
};

// A [n, k] weight packed in panels of 32 outputs, padded with zeros:
//   f32   [ceil(n/32)][k][32]
//   bf16  [ceil(n/32)][ceil(k/2)][32][2]
struct PackedMatrix {
    const void* data;
    int64_t n, k;
    Type type;
};
constexpr int64_t kPanel = 32;

static inline int64_t panel_bytes(int64_t k, Type type) {
    return type == Type::f32 ? k * kPanel * 4 : (k + 1) / 2 * kPanel * 4;
}

static inline int64_t packed_bytes(int64_t n, int64_t k, Type type) {
    return (n + kPanel - 1) / kPanel * panel_bytes(k, type);
}

// y[r, :] = matrix row ids[r], widened or rounded to y's type.
struct EmbedArgs {
    const int32_t* ids;  // [rows]
    int64_t rows;
    bool packed;  // weight is in panels; else [n, k] row after row
    PackedMatrix weight;
    Rows y;
    Pool* pool;
};

// The same from a matrix of integers: each times its scale, in f32.
struct EmbedIntsArgs {
    const int32_t* ids;  // [rows]
    int64_t rows;
    PackedInts weight;
    Rows y;
    Pool* pool;
};

// y = x @ W.T (+ bias). x has the weight's type.
struct LinearArgs {
    Rows x, y;
    int64_t rows;
    PackedMatrix weight;
    const float* bias;  // [n] or null
    Pool* pool;
};

// y = x @ W.T (+ bias) with W as integers; x, f32 or bf16, is quantized to int8.
struct LinearIntsArgs {
    Rows x, y;
    int64_t rows;
    PackedInts weight;
    const float* bias;  // [n] or null
    Pool* pool;
};

// Quantizes lanes low .. high of a panel from 32 rows of a weight, with lanes side by side.
struct PackIntsArgs {
    const float* values;  // [k][32]
    int64_t k;
    IntScheme scheme;
    char* panel;
    int64_t low, high;
    int64_t* coarse_rows;  // increased by the lanes for which 8 bits are too coarse
};

// With delta: x += delta first (in place, rounded to x's type). y may alias x.
struct NormArgs {
    Rows x, delta, y;  // delta.data null: none
    int64_t rows;
    bool layer;  // layer norm; else rms
    float eps;
    const float* weight;  // [group or width], or null
    const float* bias;    // same, or null
    int64_t group;        // 0: the whole row; else each run of `group` columns separately
    Pool* pool;
};

// Rotates the first 2 * half columns of each head in place: i with i + half.
struct RopeArgs {
    Rows x;
    int64_t rows;
    int64_t heads, head_dim, half;
    const int32_t* positions;  // [rows]
    const float* cos;          // [positions, half]
    const float* sin;          // [positions, half]
    Pool* pool;
};

enum class Activation : int32_t { silu = 0, gelu = 1, gelu_tanh = 2, relu = 3 };

// y = f(gate) * up; up.data null: y = f(gate).
struct ActivationArgs {
    Rows gate, up, y;
    int64_t rows;
    Activation form;
    Pool* pool;
};

struct AddArgs {  // x += y
    Rows x, y;
    int64_t rows;
    Pool* pool;
};

struct ScaleArgs {  // x *= factor
    Rows x;
    int64_t rows;
    float factor;
    Pool* pool;
};

struct SoftCapArgs {  // x = cap * tanh(x / cap)
    Rows x;
    int64_t rows;
    float cap;
    Pool* pool;
};

struct CopyArgs {  // y = x, rounded to y's type
    Rows x, y;
    int64_t rows;
    Pool* pool;
};

struct GatherRowsArgs {  // y[r] = x[index[r]]; same type
    Rows x, y;
    int64_t rows;  // of y
    const int32_t* index;
    Pool* pool;
};

// Routing weights y[r, e] by a router's logits x[r, e], both f32 (quire/program/expert_ops.py).
enum class RouterScore : int32_t { softmax = 0, sigmoid = 1 };
enum class RoutingForm : int32_t { scores = 0, normalized = 1 };
constexpr int64_t kMaxExperts = 1024;
struct RouteArgs {
    Rows x, y;
    int64_t rows;
    RouterScore score;
    RoutingForm form;
    int64_t top_k;
    const float* bias;  // [experts], or null
    int64_t groups, top_groups;  // groups 0: none
    float scale;
    Pool* pool;
};

// y[r] += weights[r, j] * parts[places[r, j] - first], for each j in order where the place is one
// of first .. end; y begins at zero where `first` is 0. All f32.
struct SumExpertsArgs {
    Rows parts, y;
    int64_t rows, top_k;
    const int32_t* places;  // [rows, top_k]; -1: none
    const float* weights;   // [rows, top_k]
    int64_t first, end;
    Pool* pool;
};

// Geometry of a paged cache. One layer is [block][kv_head]{ K part | V part }, its base 64-byte
// aligned; the inside of a part belongs to store_kv.cc and attention.cc. Keys lie in groups of
// 16 positions, so that the stride of a product does not grow with the block:
//   bf16  K [block_size/16][ceil(head_dim/2)][16][2]   V [block_size/2][head_dim][2]
//   f32   K [block_size/16][head_dim][16]              V [block_size][head_dim]
// A block of fewer positions is one group of that many; attention gathers several into one of 16.
// `ints`: int8 in the same places, and behind a part's elements a scale in f32 for each position:
// a row of one head is its integers times its scale.
constexpr int32_t kMaxHeadDim = 256;
constexpr int64_t kKeyGroup = 16;

struct CacheShape {
    Type type;  // type of queries, keys and values in products
    int32_t kv_heads, head_dim;
    int32_t block_size;  // 4, 8, or a multiple of 16 up to 128
    bool ints = false;   // stored as int8

    // Positions of a group of keys.
    int64_t key_group() const { return block_size < kKeyGroup ? block_size : kKeyGroup; }
};

// Bytes of the elements of the K part, and of the V part, of one block and head: a multiple of 64.
static inline int64_t kv_element_bytes(const CacheShape& shape) {
    const int64_t dim = shape.type == Type::f32 ? shape.head_dim : round_up(shape.head_dim, 2);
    return round_up(dim * shape.block_size * (shape.ints ? 1 : type_bytes(shape.type)), 64);
}

// The same with the scales.
static inline int64_t kv_part_bytes(const CacheShape& shape) {
    return kv_element_bytes(shape) + (shape.ints ? shape.block_size * int64_t{4} : 0);
}

// Bytes of one block of one layer.
static inline int64_t kv_block_bytes(const CacheShape& shape) {
    return 2 * kv_part_bytes(shape) * shape.kv_heads;
}

// Writes keys and values of each token at kv_slots (block * block_size + position % block_size);
// a slot of -1 stores nothing. k and v have the shape's type, width kv_heads * head_dim.
struct StoreKvArgs {
    Rows k, v;
    int64_t num_tokens;
    const int32_t* kv_slots;  // [num_tokens]
    void* cache;              // base of this layer
    CacheShape shape;
    Pool* pool;
};

// Causal attention of each token over positions 0..p of its sequence, from the cache only.
// q has the shape's type, width heads * head_dim; y likewise (y may be f32 or that type).
struct AttentionArgs {
    Rows q, y;
    int64_t num_tokens;
    int64_t num_sequences;
    const int32_t* seq_starts;    // [num_sequences + 1] rows of q
    const int32_t* positions;     // [num_tokens]
    const int32_t* block_tables;  // [num_sequences, table_columns]
    int64_t table_columns;
    const void* cache;  // base of this layer
    CacheShape shape;
    int64_t heads;
    float scale;
    int64_t window;  // 0: none; else positions p - window + 1 .. p
    float soft_cap;  // 0: none
    int64_t* pieces_read;  // increased by the pieces of the cache that were read, per KV head
    Pool* pool;
};

// Where several ranks have the pieces of 256 positions of a cache by turns (p, rank p % degree),
// a part is what one piece gives for one head of a token: `head_dim` weighted values, the largest
// score and the sum of the probabilities. A token has a part of each head for each piece it sees.
constexpr int64_t kPiecePositions = 256;
constexpr int64_t kPartNumbers = 2;  // of a part, beside the values

// Tokens begin .. end, all of one sequence.
struct TokenRun {
    int32_t begin, end, sequence;
};

// The first piece that a token at `position` sees.
static inline int64_t first_piece_of(int64_t position, int64_t window) {
    const int64_t first = window > 0 ? position - window + 1 : 0;
    return first > 0 ? first / kPiecePositions : 0;
}

// Parts of one rank: of its pieces from first_piece on and before end_piece. y is not written.
struct AttentionPartsArgs {
    AttentionArgs attention;
    const TokenRun* runs;
    int64_t num_runs;
    int64_t rank, degree;
    int64_t first_piece, end_piece;
    float* parts;           // [parts of tokens, heads, head_dim + kPartNumbers]
    const int64_t* starts;  // [num_tokens] where a token has its parts, piece by piece
};

// Merges parts of all ranks by piece, in the order of attention. Tokens with all their
// pieces before end_piece are written to y; the others go on where the next call begins.
struct MergePartsArgs {
    Rows y;  // heads * head_dim columns
    int64_t begin, count;  // tokens
    int64_t heads, head_dim;
    int64_t window;
    const int32_t* positions;  // [num_tokens]
    int64_t degree;
    int64_t first_piece, end_piece;
    const float* parts;     // [parts of tokens, heads, head_dim + kPartNumbers]
    const int64_t* starts;  // [degree, num_tokens] where a token has its parts of a rank
    int64_t num_tokens;
    float* sums;  // [count, heads, head_dim + kPartNumbers] merged so far
    Pool* pool;
};

// Measures limits of the machine: bytes read, operations (a multiplication and an addition are
// two), or pieces of work distributed to all threads. `done` is the amount; 0: this instruction set
// has no such loop.
enum class Limit : int32_t {
    read, fma_f32, dot_bf16, dot_int8, tile_bf16, tile_int8, fork_join
};
struct LimitArgs {
    Limit limit;
    const void* data;  // of `read`
    int64_t bytes;
    int64_t chunks;  // of all others
    int64_t* done;
    Pool* pool;
};

struct ChooseArgs;  // token choice: quire/sampling.h
struct ScoreArgs;   // scores of known tokens: quire/sampling_score.h

#define QUIRE_KERNELS(KERNEL)                   \
    KERNEL(embed, EmbedArgs)                    \
    KERNEL(embed_ints, EmbedIntsArgs)           \
    KERNEL(linear, LinearArgs)                  \
    KERNEL(linear_ints, LinearIntsArgs)         \
    KERNEL(pack_ints, PackIntsArgs)             \
    KERNEL(norm, NormArgs)                      \
    KERNEL(rope, RopeArgs)                      \
    KERNEL(activation, ActivationArgs)          \
    KERNEL(add, AddArgs)                        \
    KERNEL(scale, ScaleArgs)                    \
    KERNEL(soft_cap, SoftCapArgs)               \
    KERNEL(copy, CopyArgs)                      \
    KERNEL(gather_rows, GatherRowsArgs)         \
    KERNEL(route, RouteArgs)                    \
    KERNEL(sum_experts, SumExpertsArgs)         \
    KERNEL(store_kv, StoreKvArgs)               \
    KERNEL(attention, AttentionArgs)            \
    KERNEL(attention_parts, AttentionPartsArgs) \
    KERNEL(merge_parts, MergePartsArgs)         \
    KERNEL(limit, LimitArgs)                    \
    KERNEL(choose, ChooseArgs)                  \
    KERNEL(score, ScoreArgs)

// One instruction set's kernels. Each is defined in its own file, inside
// `namespace quire::QUIRE_ISA_NS`, as `void name(const Args& args)`.
struct KernelTable {
    const char* isa;
#define QUIRE_KERNEL_ENTRY(name, Args) void (*name)(const Args& args);
    QUIRE_KERNELS(QUIRE_KERNEL_ENTRY)
#undef QUIRE_KERNEL_ENTRY
};

#ifdef QUIRE_ISA_NS
namespace QUIRE_ISA_NS {
#define QUIRE_KERNEL_DECLARATION(name, Args) void name(const Args& args);
QUIRE_KERNELS(QUIRE_KERNEL_DECLARATION)
#undef QUIRE_KERNEL_DECLARATION
}  // namespace QUIRE_ISA_NS
#endif

}  // namespace quire

// activation, add, scale, soft_cap and copy: element by element, in f32, rounded once to the
// output's type. An element of a result depends only on the elements at its position, so neither
// vectors nor threads can change it. exp and erf are our own polynomials: no library determines any
// bits.

#include "quire/rows.h"

namespace quire::QUIRE_ISA_NS {

namespace {

// x[i] becomes x[i] / (1 + e^-y[i])
template <int n>
QUIRE_VEC void gate_each(Vec* x, const Vec* y) {
    Vec e[n];
#pragma GCC unroll 4
    for (int i = 0; i < n; ++i) e[i] = sub(zero(), y[i]);
    exp_each<n>(e);
#pragma GCC unroll 4
    for (int i = 0; i < n; ++i) x[i] = div(x[i], add(set1(1.0f), e[i]));
}

// a + x * (b + x * (...)), coefficients from the highest power down.
template <int n>
QUIRE_VEC Vec polynomial(const float (&coefficients)[n], Vec x) {
    Vec sum = set1(coefficients[0]);
#pragma GCC unroll 8
    for (int i = 1; i < n; ++i) sum = fma(sum, x, set1(coefficients[i]));
    return sum;
}

// erf within about 1e-7: x times a polynomial in x^2 below 1, else 1 - e^(a polynomial in |x|),
// 1 - erf being below half a unit in the last place from 4 on. Both are our own minimax fits.
QUIRE_VEC Vec erf(Vec x) {
    constexpr float kNear[] = {7.8538607340e-05f, -8.0101937056e-04f, 5.1883277483e-03f,
                               -2.6853812858e-02f, 1.1283585429e-01f, -3.7612625957e-01f,
                               1.1283791065e+00f};
    constexpr float kFar[] = {1.8557402655e-04f, -2.9396074824e-03f, 2.1805318072e-02f,
                              -1.0303737223e-01f, -6.3822567463e-01f, -1.1270400286e+00f,
                              -3.5371931153e-04f};
    const Vec one = set1(1.0f);
    const Vec a = abs(x);
    const Vec near = mul(x, polynomial(kNear, mul(x, x)));
    const Vec far = sub(one, exp(polynomial(kFar, min(set1(4.0f), a))));
    return select_less(a, one, near, copy_sign(far, x));
}

template <Activation form, int n>
QUIRE_VEC void apply_each(Vec* x) {
    const Vec half = set1(0.5f);
    Vec y[n];
    if constexpr (form == Activation::silu) {
        for (int i = 0; i < n; ++i) y[i] = x[i];
        gate_each<n>(x, y);
    } else if constexpr (form == Activation::gelu_tanh) {
        // x / 2 (1 + tanh u) is x / (1 + e^-2u).
        for (int i = 0; i < n; ++i) {
            const Vec cube = mul(mul(x[i], x[i]), mul(x[i], set1(0.044715f)));
            y[i] = mul(set1(1.59576912f), add(x[i], cube));
        }
        gate_each<n>(x, y);
    } else if constexpr (form == Activation::gelu) {
        for (int i = 0; i < n; ++i) {
            const Vec share = erf(mul(x[i], set1(0.70710678f)));
            x[i] = mul(mul(half, x[i]), add(set1(1.0f), share));
        }
    } else {
        for (int i = 0; i < n; ++i) x[i] = max(zero(), x[i]);
    }
}

// y = form(gate), times up if there is one, two vectors at a time.
template <Activation form, class X, class Y>
void activate_row(const X* gate, const X* up, Y* y, int64_t width) {
    int64_t c = 0;
    for (; c + 2 * kLanes <= width; c += 2 * kLanes) {
        Vec x[2] = {load(gate + c), load(gate + c + kLanes)};
        apply_each<form, 2>(x);
        if (up != nullptr) {
            x[0] = mul(x[0], load(up + c));
            x[1] = mul(x[1], load(up + c + kLanes));
        }
        store_two(y + c, x[0], x[1]);
    }
    for (; c < width; c += kLanes) {
        const int n = width - c < kLanes ? static_cast<int>(width - c) : kLanes;
        Vec x = load_some(gate + c, n);
        apply_each<form, 1>(&x);
        if (up != nullptr) x = mul(x, load_some(up + c, n));
        store_some(y + c, x, n);
    }
}

template <Activation form>
void activate(const ActivationArgs& args) {
    const int64_t width = args.gate.width;
    args.pool->deal(args.rows, rows_per_chunk(width), [&](int64_t begin, int64_t end, int) {
        for (int64_t row = begin; row < end; ++row) {
            with_type(args.gate.type, [&](auto* in_tag) {
                const auto* gate = static_cast<decltype(in_tag)>(args.gate.at(row));
                const auto* up = args.up.data == nullptr
                                     ? nullptr
                                     : static_cast<decltype(in_tag)>(args.up.at(row));
                with_type(args.y.type, [&](auto* out_tag) {
                    activate_row<form>(gate, up, static_cast<decltype(out_tag)>(args.y.at(row)),
                                       width);
                });
            });
        }
    });
}

}  // namespace

void activation(const ActivationArgs& args) {
    switch (args.form) {
        case Activation::silu: return activate<Activation::silu>(args);
        case Activation::gelu: return activate<Activation::gelu>(args);
        case Activation::gelu_tanh: return activate<Activation::gelu_tanh>(args);
        case Activation::relu: return activate<Activation::relu>(args);
    }
}

void add(const AddArgs& args) {
    const int64_t width = args.x.width;
    args.pool->deal(args.rows, rows_per_chunk(width), [&](int64_t begin, int64_t end, int) {
        for (int64_t row = begin; row < end; ++row) {
            with_type(args.x.type, [&](auto* x_tag) {
                auto* x = static_cast<decltype(x_tag)>(args.x.at(row));
                with_type(args.y.type, [&](auto* y_tag) {
                    const auto* y = static_cast<decltype(y_tag)>(args.y.at(row));
                    for_columns(width, [&](int64_t c, int n) {
                        store_some(x + c, add(load_some(x + c, n), load_some(y + c, n)), n);
                    });
                });
            });
        }
    });
}

void scale(const ScaleArgs& args) {
    const int64_t width = args.x.width;
    const Vec factor = set1(args.factor);
    args.pool->deal(args.rows, rows_per_chunk(width), [&](int64_t begin, int64_t end, int) {
        for (int64_t row = begin; row < end; ++row) {
            with_type(args.x.type, [&](auto* x_tag) {
                auto* x = static_cast<decltype(x_tag)>(args.x.at(row));
                for_columns(width, [&](int64_t c, int n) {
                    store_some(x + c, mul(load_some(x + c, n), factor), n);
                });
            });
        }
    });
}

void soft_cap(const SoftCapArgs& args) {
    const int64_t width = args.x.width;
    const Vec cap = set1(args.cap);
    args.pool->deal(args.rows, rows_per_chunk(width), [&](int64_t begin, int64_t end, int) {
        for (int64_t row = begin; row < end; ++row) {
            with_type(args.x.type, [&](auto* x_tag) {
                auto* x = static_cast<decltype(x_tag)>(args.x.at(row));
                for_columns(width, [&](int64_t c, int n) {
                    const Vec share = div(load_some(x + c, n), cap);
                    store_some(x + c, mul(tanh(share), cap), n);
                });
            });
        }
    });
}

void copy(const CopyArgs& args) {
    const int64_t width = args.x.width;
    args.pool->deal(args.rows, rows_per_chunk(width), [&](int64_t begin, int64_t end, int) {
        for (int64_t row = begin; row < end; ++row) {
            with_type(args.x.type, [&](auto* x_tag) {
                const auto* x = static_cast<decltype(x_tag)>(args.x.at(row));
                with_type(args.y.type, [&](auto* y_tag) {
                    auto* y = static_cast<decltype(y_tag)>(args.y.at(row));
                    for_columns(width, [&](int64_t c, int n) {
                        store_some(y + c, load_some(x + c, n), n);
                    });
                });
            });
        }
    });
}

}  // namespace quire::QUIRE_ISA_NS

// Distances of one kind of processor. distances.hpp includes this file once for each kind: PROCESSOR is
// the namespace, TARGET the attribute of functions, WIDTH the bytes of a register. The order of sums does
// not depend on the width, and no product is fused with a sum: every kind rounds alike.

namespace PROCESSOR {

using Floats = float __attribute__((vector_size(WIDTH)));
using Doubles = double __attribute__((vector_size(WIDTH)));
// Values of a vector, which begins anywhere: for a register of floats, and for one of doubles.
using Values = float __attribute__((vector_size(WIDTH), aligned(4), may_alias));
using Halves = float __attribute__((vector_size(WIDTH / 2), aligned(4), may_alias));

// The sum of (x - y)^2 (`squared`) or of x * y over `dim` values.
template <bool squared>
TARGET inline float summed(const float* x, const float* y, std::size_t dim) {
    // So many sums: the processor adds to some while it waits for the others.
    constexpr std::size_t registers = 32 * sizeof(float) / WIDTH;
    const auto* xs = reinterpret_cast<const Values*>(x);
    const auto* ys = reinterpret_cast<const Values*>(y);
    Floats sums[registers] = {};
    std::size_t left = dim;
    for (; left >= 32; left -= 32) {
        for (std::size_t i = 0; i < registers; i++) {
            const Floats first = squared ? xs[i] - ys[i] : Floats(xs[i]);
            sums[i] += first * (squared ? first : Floats(ys[i]));
        }
        xs += registers;
        ys += registers;
    }
    if (left >= 16) {
        for (std::size_t i = 0; i < registers / 2; i++) {
            const Floats first = squared ? xs[i] - ys[i] : Floats(xs[i]);
            sums[i] += first * (squared ? first : Floats(ys[i]));
        }
        left -= 16;
    }
    Four parts[4], four = {};
    for (std::size_t i = 0; i < registers / 2; i++) {
        const Floats both = sums[i] + sums[i + registers / 2];
        std::memcpy(reinterpret_cast<char*>(parts) + i * WIDTH, &both, WIDTH);
    }
    std::size_t at = dim - left;
    for (; at + 4 <= dim; at += 4) {
        Four a, b;
        std::memcpy(&a, x + at, sizeof a);
        std::memcpy(&b, y + at, sizeof b);
        const Four first = squared ? a - b : a;
        four += first * (squared ? first : b);
    }
    four += (parts[0] + parts[2]) + (parts[1] + parts[3]);
    float rest = 0;
    for (; at < dim; at++) {
        const float first = squared ? x[at] - y[at] : x[at];
        rest += first * (squared ? first : y[at]);
    }
    return ((four[0] + four[2]) + (four[1] + four[3])) + rest;
}

// The same in float64.
template <bool squared>
TARGET inline double summed_exactly(const float* x, const float* y, std::size_t dim) {
    constexpr std::size_t registers = 8 * sizeof(double) / WIDTH;
    const auto* xs = reinterpret_cast<const Halves*>(x);
    const auto* ys = reinterpret_cast<const Halves*>(y);
    Doubles sums[registers] = {};
    for (std::size_t at = 0; at < dim / 8; at++) {
        for (std::size_t i = 0; i < registers; i++) {
            const Doubles a = __builtin_convertvector(xs[i], Doubles);
            const Doubles b = __builtin_convertvector(ys[i], Doubles);
            const Doubles first = squared ? a - b : a;
            sums[i] += first * (squared ? first : b);
        }
        xs += registers;
        ys += registers;
    }
    double lanes[8];
    std::memcpy(lanes, sums, sizeof lanes);
    for (std::size_t at = dim / 8 * 8; at < dim; at++) {
        const double first = squared ? double(x[at]) - double(y[at]) : double(x[at]);
        lanes[0] += first * (squared ? first : double(y[at]));
    }
    return ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) +
           ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
}

TARGET inline float squared_l2(const void* x, const void* y, const void* dim) {
    return summed<true>(
        static_cast<const float*>(x), static_cast<const float*>(y), *static_cast<const std::size_t*>(dim)
    );
}

TARGET inline float inner_product(const void* x, const void* y, const void* dim) {
    return 1 - summed<false>(
        static_cast<const float*>(x), static_cast<const float*>(y), *static_cast<const std::size_t*>(dim)
    );
}

constexpr Distances DISTANCES = {
    squared_l2, inner_product, summed_exactly<true>, summed_exactly<false>
};

}  // namespace PROCESSOR

#undef PROCESSOR
#undef TARGET
#undef WIDTH

// Distances between two vectors. The functions for the processor at hand are chosen when the module is
// loaded, so that one build is fast on every processor of its architecture.
#pragma once

#include <cstddef>
#include <cstring>

namespace nobackfill {

// As hnswlib calls it: two vectors, and where the dimension is.
using Distance = float (*)(const void*, const void*, const void*);
using Sum = double (*)(const float*, const float*, std::size_t);

struct Distances {
    // In float32. `inner_product` is 1 less the product.
    Distance squared_l2, inner_product;
    // In float64: the sum of squared differences, and of products.
    Sum squares, product;
};

using Four = float __attribute__((vector_size(16)));

#define PROCESSOR any_processor
#define WIDTH 16
#define TARGET
#include "lanes.hpp"

#ifdef __x86_64__
#define PROCESSOR avx2
#define WIDTH 32
#define TARGET __attribute__((target("avx2")))
#include "lanes.hpp"

#define PROCESSOR avx512
#define WIDTH 64
#define TARGET __attribute__((target("avx512f")))
#include "lanes.hpp"
#endif

inline const Distances& fastest() {
#ifdef __x86_64__
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f")) return avx512::DISTANCES;
    if (__builtin_cpu_supports("avx2")) return avx2::DISTANCES;
#endif
    return any_processor::DISTANCES;
}

inline const Distances DISTANCES = fastest();

}  // namespace nobackfill

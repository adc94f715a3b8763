// The nearest of a database's candidates, as distances.py and index.best rank them.
#pragma once

#include <cstring>

#include "nearest.hpp"

namespace nobackfill {

// PostgreSQL's binary form of a vector, big-endian: dimensions, two bytes of nothing, floats.
constexpr std::size_t SIZED = 4;

inline std::vector<float> unpacked(std::string_view bytes) {
    std::vector<float> values((bytes.size() - SIZED) / 4);
    for (std::size_t i = 0; i < values.size(); i++) {
        const auto* byte = reinterpret_cast<const unsigned char*>(bytes.data()) + SIZED + 4 * i;
        const std::uint32_t word = std::uint32_t(byte[0]) << 24 | std::uint32_t(byte[1]) << 16 |
                                   std::uint32_t(byte[2]) << 8 | byte[3];
        std::memcpy(&values[i], &word, 4);
    }
    return values;
}

struct Candidate {
    std::int64_t label;
    std::string_view bytes;
};

// The `k` nearest, or all where there are fewer; none: one is at the end of what is taken, and another
// rounding of its norm would refuse it.
inline std::optional<std::vector<Found>> ranked(
    Metric metric, std::vector<float> query, const std::vector<Candidate>& candidates, std::size_t k
) {
    if (!prepare(metric, false, query)) return std::nullopt;
    std::vector<Found> found;
    found.reserve(candidates.size());
    for (const Candidate& one : candidates) {
        std::vector<float> row = unpacked(one.bytes);
        if (!prepare(metric, false, row)) return std::nullopt;
        found.push_back({between(metric, query.data(), row.data(), row.size()), one.label});
    }
    std::sort(found.begin(), found.end());
    if (found.size() > k) found.resize(k);
    return found;
}

}  // namespace nobackfill

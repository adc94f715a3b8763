// Hits as the bytes of a SearchResponse: see server/galleries/hit_bytes.py.
#pragma once

#include <charconv>
#include <string>

#include "nearest.hpp"

namespace nobackfill {

// A calibration: see release/calibration.py. Empty: none.
struct Curve {
    std::vector<double> distances, probabilities;

    // Calibration.beyond.
    bool beyond(double x) const { return x < distances.front() || x > distances.back(); }

    // numpy.interp.
    double score(double x) const {
        const std::size_t n = distances.size();
        if (x > distances[n - 1]) return probabilities[n - 1];
        if (x < distances[0]) return probabilities[0];
        const std::size_t j =
            std::size_t(std::upper_bound(distances.begin(), distances.end(), x) - distances.begin()) -
            1;
        if (j == n - 1 || distances[j] == x) return probabilities[j];
        const double slope =
            (probabilities[j + 1] - probabilities[j]) / (distances[j + 1] - distances[j]);
        return slope * (x - distances[j]) + probabilities[j];
    }
};

// To three significant digits: ranking.rounded.
inline float rounded(float distance) {
    char digits[64];
    const auto end =
        std::to_chars(digits, digits + sizeof digits, double(distance), std::chars_format::general, 3);
    double found = distance;
    std::from_chars(digits, end.ptr, found);
    return float(found);
}

inline void put(std::string& into, char tag, float value) {
    char bytes[5] = {tag};
    std::memcpy(bytes + 1, &value, 4);
    into.append(bytes, 5);
}

}  // namespace nobackfill

// The nearest of a snapshot: a graph with its tombstones, and an exact delta beside it.
#pragma once

#include <algorithm>
#include <cmath>
#include <optional>

#include "graph.hpp"

namespace nobackfill {

struct Found {
    float distance;
    std::int64_t label;
    bool operator<(const Found& other) const {
        return distance != other.distance ? distance < other.distance : label < other.label;
    }
};

// Rows that are searched one by one.
struct Rows {
    const float* vectors = nullptr;
    const std::int64_t* labels = nullptr;
    std::size_t count = 0;
    Masks masks;
};

enum class Metric { squared_l2, cosine };

// See vectors.check_vectors and distances.prepare: what they refuse is refused, and what they make of
// a query is made.
constexpr double LARGEST_NORM = 1e15, UNIT = 1e-3, PREPARED = 2.5e-7;

// As distances.between: in float64, rounded once.
inline float between(Metric metric, const float* query, const float* row, std::size_t dim) {
    if (metric == Metric::squared_l2) return ordered(float(DISTANCES.squares(row, query, dim)));
    return ordered(float(std::max(1 - DISTANCES.product(row, query, dim), 0.0)));
}

// False: refused.
inline bool prepare(Metric metric, bool unit, std::vector<float>& query) {
    const double squared = DISTANCES.product(query.data(), query.data(), query.size());
    if (!(squared <= LARGEST_NORM * LARGEST_NORM)) return false;
    const double norm = std::sqrt(squared);
    if (unit && !(std::abs(norm - 1) <= UNIT)) return false;
    if (metric == Metric::cosine && !(std::abs(norm - 1) <= PREPARED)) {
        const float by = float(std::max(norm, 1e-30));
        for (float& value : query) value /= by;
    }
    return true;
}

// Microseconds at 128 dims, measured at 100,000 with masks that pass .1 % to 80 %: which of three ways
// is taken. A row compared by itself; a walk, and each candidate that it keeps; how much longer a walk
// among what passes takes. All grow alike with the dims.
constexpr double ROW = 0.045, WALK = 40, CANDIDATE = 1.6, AMONG = 1.7;
// The share of the candidates among which enough have to pass: at the far end a graph finds less.
constexpr double NEAR_END = 0.75;
// Candidates of a walk with a filter, at least: it finds less than one without.
constexpr std::size_t FILTERED = 64;

inline double walking(std::size_t candidates) { return WALK + CANDIDATE * double(candidates); }

struct Snapshot {
    Metric metric;
    bool unit;
    Graph graph;
    // Of the graph's rows; `elements`: where each lies, null: in their order.
    const std::int64_t* labels;
    const std::int64_t* elements;
    std::size_t rows;
    const std::uint8_t* live;
    // Candidates of the graph's own.
    std::size_t ef;
    Rows delta;

    // The `k` nearest, nearest first, of the `asked` nearest of the graph, k at least; none: search
    // exactly. `base` and `beside` say which rows of the graph and of the delta were chosen.
    std::optional<std::vector<Found>> nearest(
        const std::vector<float>& query, std::size_t k, std::size_t asked,
        const std::uint8_t* base, const std::uint8_t* beside
    ) const {
        const Masks masks{live, base};
        std::vector<Found> found;
        if (!(masks.any() ? passing(query, k, asked, masks, found) : all(query, k, asked, found)))
            return std::nullopt;
        Rows rest = delta;
        rest.masks.chosen = beside;
        add_rows(query, k, rest, found);
        std::sort(found.begin(), found.end());
        if (found.size() > k) found.resize(k);
        return found;
    }

  private:
    // As HnswIndex.search and what it asks of hnswlib, candidate by candidate.
    bool all(
        const std::vector<float>& query, std::size_t k, std::size_t asked, std::vector<Found>& found
    ) const {
        Heap top = walk(graph, query.data(), std::max(ef, asked), descend(graph, query.data()));
        if (top.size() < asked) return false;
        while (top.size() > asked) top.pop();
        std::vector<std::pair<std::pair<float, std::uint64_t>, Element>> sorted;
        for (; !top.empty(); top.pop())
            sorted.push_back({{top.top().first, graph.name(top.top().second)}, top.top().second});
        std::sort(sorted.begin(), sorted.end());
        sorted.resize(k);
        for (const auto& one : sorted) found.push_back(of(one.second, one.first.first));
        return true;
    }

    Found of(Element e, float distance) const {
        // The inner product of a vector with itself can be rounded to above 1.
        return {std::max(distance, 0.0f), labels[graph.held[e]]};
    }

    // The cheapest of: every row that passes; a walk so wide that enough of what it meets passes; a
    // walk among what passes. What passes may hang apart, or lie where a walk does not come by: then
    // the next way is taken, and at last none.
    bool passing(
        const std::vector<float>& query, std::size_t k, std::size_t asked, const Masks& masks,
        std::vector<Found>& found
    ) const {
        const std::size_t count = counted(masks), wanted = std::min(k, count);
        if (!count) return true;
        const std::size_t most = std::max({ef, asked, FILTERED});
        // What passes is found by its own links: by so many more the fewer there are, and the more
        // are wanted.
        const bool sparse = count < rows / 20;
        const std::size_t dense = std::max(3 * most / 8, std::min(3 * most / 4, k + 16));
        const std::size_t fewer = std::max(asked, sparse ? most : dense);
        const double some = (double(wanted) + 2.5 * std::sqrt(double(wanted)) + 2) / NEAR_END;
        const std::size_t wide = std::min(
            rows, std::max(most, std::size_t(some * double(rows) / double(count)))
        );
        const double wider = walking(wide), among_ = walking(SEEDS) + AMONG * walking(fewer);
        if (ROW * double(count) <= std::min(wider, among_)) {
            among(query, k, masks, count, found);
            return true;
        }
        const Near start = descend(graph, query.data());
        if (wider <= among_ && met(query, wide, wanted, start, masks, found)) return true;
        Heap top = walk_passing(graph, query.data(), fewer, start, masks);
        if (top.size() < std::min(fewer, count)) return false;
        for (; !top.empty(); top.pop()) found.push_back(of(top.top().second, top.top().first));
        return true;
    }

    std::size_t counted(const Masks& masks) const {
        const std::uint8_t* first = masks.chosen ? masks.chosen : masks.live;
        const std::uint8_t* second = masks.live ? masks.live : first;
        std::size_t count = 0, row = 0;
        // Each byte is 0 or 1: the product has the sum of the eight as its highest.
        for (; row + 8 <= rows; row += 8) {
            std::uint64_t a, b;
            std::memcpy(&a, first + row, 8);
            std::memcpy(&b, second + row, 8);
            count += std::size_t((a & b) * 0x0101010101010101 >> 56);
        }
        for (; row < rows; row++) count += first[row] & second[row];
        return count;
    }

    // What passes of the `wide` nearest, if it is enough of them.
    bool met(
        const std::vector<float>& query, std::size_t wide, std::size_t wanted, Near start,
        const Masks& masks, std::vector<Found>& found
    ) const {
        Heap top = walk(graph, query.data(), wide, start);
        const std::size_t reached = top.size();
        const std::size_t near = wide == rows ? wide : std::size_t(NEAR_END * double(wide));
        std::size_t enough = 0;
        for (; !top.empty(); top.pop()) {
            if (!masks.pass(graph.held[top.top().second])) continue;
            enough += top.size() <= near;
            found.push_back(of(top.top().second, top.top().first));
        }
        if (reached == wide && enough >= wanted) return true;
        found.clear();
        return false;
    }

    // Those of the `count` rows that pass that are the `k` nearest, and maybe more.
    void among(
        const std::vector<float>& query, std::size_t k, const Masks& masks, std::size_t count,
        std::vector<Found>& found
    ) const {
        const std::vector<Element> few = collected(masks, count);
        std::vector<Near> rough;
        std::priority_queue<float> nearest;
        float limit = std::numeric_limits<float>::infinity();
        for (std::size_t i = 0; i < count; i++) {
            if (i + 8 < count) __builtin_prefetch(graph.vector_of(few[i + 8]));
            const float apart = graph.apart(query.data(), few[i]);
            if (apart > limit) continue;
            rough.emplace_back(apart, few[i]);
            nearest.push(apart);
            if (nearest.size() > k) nearest.pop();
            if (nearest.size() == k) limit = nearest.top() + 2 * error(nearest.top());
        }
        for (const Near& one : rough)
            if (one.first <= limit)
                found.push_back(
                    {between(metric, query.data(), graph.vector_of(one.second), graph.dim),
                     labels[graph.held[one.second]]}
                );
    }

    // Of the `count` rows that pass.
    std::vector<Element> collected(const Masks& masks, std::size_t count) const {
        std::vector<Element> few;
        few.reserve(count);
        for (std::size_t start = 0; start < rows; start += 64)
            for (std::uint64_t bits = from(masks, start); bits; bits &= bits - 1) {
                const std::size_t row = start + std::size_t(__builtin_ctzll(bits));
                few.push_back(Element(elements ? elements[row] : row));
            }
        return few;
    }

    // Which of 64 rows from a row on pass, a bit each, the first row's lowest: asked row by row it took
    // longer than to compare the vectors.
    std::uint64_t from(const Masks& masks, std::size_t start) const {
        static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the first byte is the lowest");
        const std::uint8_t* first = masks.chosen ? masks.chosen : masks.live;
        const std::uint8_t* second = masks.live ? masks.live : first;
        std::uint64_t bits = 0;
        if (start + 64 > rows) {
            for (std::size_t row = start; row < rows; row++)
                bits |= std::uint64_t(first[row] & second[row]) << (row - start);
            return bits;
        }
        std::uint64_t a[8], b[8], any = 0;
        std::memcpy(a, first + start, 64);
        std::memcpy(b, second + start, 64);
        for (int i = 0; i < 8; i++) any |= a[i] &= b[i];
        if (!any) return 0;
        // Each byte is 0 or 1: the product has the eight as its highest bits.
        for (int i = 0; i < 8; i++) bits |= ((a[i] * 0x0102040810204080) >> 56) << (8 * i);
        return bits;
    }

    // More than rounding makes of a distance in float32: of its sum, or of one of values below 1.
    float error(float distance) const {
        const float terms = float(graph.dim + 8) * 6e-8f;
        return 1e-30f + terms * (metric == Metric::squared_l2 ? std::abs(distance) : 2.0f);
    }

    void add_rows(
        const std::vector<float>& query, std::size_t k, const Rows& rest, std::vector<Found>& found
    ) const {
        float last = std::numeric_limits<float>::infinity();
        if (found.size() >= k)
            last = std::max_element(found.begin(), found.end())->distance;
        const float limit = last + 2 * error(last);
        for (std::size_t row = 0; row < rest.count; row++) {
            if (!rest.masks.pass(std::int64_t(row))) continue;
            const float* vector = rest.vectors + row * graph.dim;
            if (graph.between(query.data(), vector) > limit) continue;
            found.push_back({between(metric, query.data(), vector, graph.dim), rest.labels[row]});
        }
    }
};

}  // namespace nobackfill

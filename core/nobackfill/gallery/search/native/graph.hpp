// An hnswlib graph in memory, which nobody changes, and the walks through it.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <queue>
#include <utility>
#include <vector>

#include "hnsw.hpp"

namespace nobackfill {

using Near = std::pair<float, Element>;

// Which rows may be found: one byte a row; null: all.
struct Masks {
    const std::uint8_t* live = nullptr;
    const std::uint8_t* chosen = nullptr;
    bool any() const { return live || chosen; }
    bool pass(std::int64_t row) const {
        return row >= 0 && (!live || live[row]) && (!chosen || chosen[row]);
    }
};

// Sorting what has no order reads beside its range: a damaged vector's distance, NaN, is farthest.
inline float ordered(float distance) {
    return distance == distance ? distance : std::numeric_limits<float>::infinity();
}

// What a walk reads of an hnswlib graph that is not empty. `held`: the row of each element, -1: nobody's.
struct Graph {
    const char* records;
    std::size_t size, vector, label, upper_size;
    const char* const* upper;
    std::size_t count, dim, m;
    int max_level;
    Element entry;
    bool deletions;
    Distance distance;
    const std::int64_t* held;

    static Graph of(const Hnsw& hnsw, const std::int64_t* held) {
        const auto& own = hnsw.graph;
        return {
            own.data_level0_memory_, own.size_data_per_element_, own.offsetData_, own.label_offset_,
            own.size_links_per_element_, own.linkLists_, hnsw.count(), hnsw.space.dim(), own.M_,
            own.maxlevel_, own.enterpoint_node_, own.num_deleted_ != 0, own.fstdistfunc_, held,
        };
    }

    const char* record(Element e) const { return records + e * size; }
    const float* vector_of(Element e) const {
        return reinterpret_cast<const float*>(record(e) + vector);
    }
    std::uint64_t name(Element e) const {
        std::uint64_t found;
        std::memcpy(&found, record(e) + label, sizeof found);
        return found;
    }
    bool marked(Element e) const { return record(e)[2] & 1; }
    float between(const float* query, const float* other) const {
        return ordered(distance(query, other, &dim));
    }
    float apart(const float* query, Element e) const {
        return between(query, vector_of(e));
    }
    // How many links, then the links.
    static std::uint16_t length(const char* list) {
        std::uint16_t found;
        std::memcpy(&found, list, sizeof found);
        return found;
    }
    static const Element* links(const char* list) {
        return reinterpret_cast<const Element*>(list + 4);
    }
    const char* above(Element e, int level) const { return upper[e] + (level - 1) * upper_size; }
    // A walk waits for memory: what it reads next is asked for together.
    void fetch(Element e) const {
        const char* first = record(e) + vector;
        for (std::size_t at = 0; at < 4 * dim; at += 64) __builtin_prefetch(first + at);
    }
    void fetch_links(Element e) const {
        for (std::size_t at = 0; at < vector; at += 64) __builtin_prefetch(record(e) + at);
    }
};

// Which elements a walk has met: a bit each, which stay in the nearest cache.
class Visited {
  public:
    explicit Visited(std::size_t count) {
        bits().assign(count / 64 + 1, 0);
        mine_ = bits().data();
    }
    // Whether it is met for the first time.
    bool add(Element e) {
        const std::uint64_t bit = std::uint64_t(1) << (e & 63);
        const bool first = !(mine_[e >> 6] & bit);
        mine_[e >> 6] |= bit;
        return first;
    }
    bool has(Element e) const { return mine_[e >> 6] >> (e & 63) & 1; }

  private:
    static std::vector<std::uint64_t>& bits() {
        thread_local std::vector<std::uint64_t> found;
        return found;
    }
    std::uint64_t* mine_;
};

struct ByDistance {
    bool operator()(const Near& a, const Near& b) const { return a.first < b.first; }
};
using Heap = std::priority_queue<Near, std::vector<Near>, ByDistance>;

// The nearest element that the upper levels lead to, and its distance.
inline Near descend(const Graph& graph, const float* query) {
    Element at = graph.entry;
    float best = graph.apart(query, at);
    for (int level = graph.max_level; level > 0; level--) {
        for (bool changed = true; changed;) {
            changed = false;
            const char* list = graph.above(at, level);
            const Element* links = Graph::links(list);
            const int n = Graph::length(list);
            for (int i = 0; i < n; i++) graph.fetch(links[i]);
            for (int i = 0; i < n; i++) {
                const float d = graph.apart(query, links[i]);
                if (d < best) {
                    best = d;
                    at = links[i];
                    changed = true;
                }
            }
        }
    }
    return {best, at};
}

// hnswlib's searchBaseLayerST, step by step, so that it finds what knn_query finds: the `ef` nearest
// elements that are not marked.
inline Heap walk(const Graph& graph, const float* query, std::size_t ef, Near start) {
    Visited visited(graph.count);
    Heap top, candidates;
    float lower = std::numeric_limits<float>::max();
    if (!graph.deletions || !graph.marked(start.second)) {
        lower = start.first;
        top.emplace(start);
    }
    candidates.emplace(-lower, start.second);
    visited.add(start.second);
    std::vector<Element> fresh;
    fresh.reserve(2 * graph.m);
    while (!candidates.empty()) {
        float far = -candidates.top().first;
        if (far > lower && (!graph.deletions || top.size() == ef)) break;
        const char* list = graph.record(candidates.top().second);
        candidates.pop();
        const Element* links = Graph::links(list);
        fresh.clear();
        for (int i = 0, n = Graph::length(list); i < n; i++) {
            if (!visited.add(links[i])) continue;
            graph.fetch(links[i]);
            fresh.push_back(links[i]);
        }
        for (const Element e : fresh) {
            const float d = graph.apart(query, e);
            if (top.size() >= ef && !(lower > d)) continue;
            candidates.emplace(-d, e);
            if (!graph.deletions || !graph.marked(e)) top.emplace(d, e);
            if (top.size() > ef) top.pop();
            if (!top.empty()) lower = top.top().first;
        }
        if (!candidates.empty()) graph.fetch_links(candidates.top().second);
    }
    return top;
}

// Nearest elements that a masked walk begins with, whether they may be found or not.
constexpr std::size_t SEEDS = 8;

// The `ef` nearest elements that pass, met by links between them: where a link leads to one that does
// not pass, those that it leads to are looked at (ACORN, Patel and others 2024, section 5, without
// its denser graph). Distances are computed of what passes only.
inline Heap walk_passing(
    const Graph& graph, const float* query, std::size_t ef, Near start, const Masks& masks
) {
    Heap seeds = walk(graph, query, SEEDS, start);
    Visited visited(graph.count);
    Heap top, candidates;
    float lower = std::numeric_limits<float>::max();
    for (; !seeds.empty(); seeds.pop()) {
        const Near seed = seeds.top();
        visited.add(seed.second);
        candidates.emplace(-seed.first, seed.second);
        if (masks.pass(graph.held[seed.second])) top.emplace(seed);
    }
    while (top.size() > ef) top.pop();
    if (top.size() == ef) lower = top.top().first;
    const std::size_t most = 2 * graph.m;
    std::vector<Element> through, fresh;
    while (!candidates.empty()) {
        if (-candidates.top().first > lower && top.size() == ef) break;
        const char* list = graph.record(candidates.top().second);
        candidates.pop();
        through.clear();
        fresh.clear();
        auto meet = [&](Element e) {
            visited.add(e);
            graph.fetch(e);
            fresh.push_back(e);
        };
        const Element* links = Graph::links(list);
        for (int i = 0, n = Graph::length(list); i < n; i++) {
            const Element e = links[i];
            if (visited.has(e)) continue;
            if (masks.pass(graph.held[e])) {
                meet(e);
            } else {
                graph.fetch_links(e);
                through.push_back(e);
            }
        }
        for (const Element barred : through) {
            if (fresh.size() >= most) break;
            visited.add(barred);
            const char* further = graph.record(barred);
            const Element* beyond = Graph::links(further);
            for (int i = 0, n = Graph::length(further); i < n; i++)
                if (!visited.has(beyond[i]) && masks.pass(graph.held[beyond[i]])) meet(beyond[i]);
        }
        for (const Element e : fresh) {
            const float d = graph.apart(query, e);
            if (top.size() >= ef && !(lower > d)) continue;
            candidates.emplace(-d, e);
            top.emplace(d, e);
            if (top.size() > ef) top.pop();
            if (top.size() == ef) lower = top.top().first;
        }
        if (!candidates.empty()) graph.fetch_links(candidates.top().second);
    }
    return top;
}

}  // namespace nobackfill

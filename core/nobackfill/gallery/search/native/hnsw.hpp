// An hnswlib graph: built row by row, or made of links; searched, and read where it lies in memory.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#ifdef __linux__
#include <sys/mman.h>
#endif

#include "distances.hpp"
#include "hnswlib/hnswlib.h"

namespace nobackfill {

using Element = hnswlib::tableint;

// hnswlib's "l2" and "ip", with our distances.
class Space : public hnswlib::SpaceInterface<float> {
  public:
    Space(std::string name, std::size_t dim) : name(std::move(name)), dim_(dim) {
        if (this->name != "l2" && this->name != "ip") throw std::invalid_argument("space: expected l2 or ip");
    }
    std::size_t get_data_size() override { return dim_ * sizeof(float); }
    Distance get_dist_func() override {
        return name == "l2" ? DISTANCES.squared_l2 : DISTANCES.inner_product;
    }
    void* get_dist_func_param() override { return &dim_; }
    std::size_t dim() const { return dim_; }

    const std::string name;

  private:
    std::size_t dim_;
};

class Hnsw {
  public:
    Hnsw(std::string space, std::size_t dim, std::size_t capacity, std::size_t m, std::size_t ef_construction)
        : space(std::move(space), dim), graph(&this->space, capacity, m, ef_construction, REPORT_SEED) {}

    // Elements named by their number, none marked. `ground`: the links of each on the ground level, one
    // element after another; `levels`: how many levels each has above; `upper`: the links there. What
    // lies in the place of the vectors is for the caller to write.
    static std::unique_ptr<Hnsw> of_links(
        std::string space, std::size_t dim, std::size_t m, std::size_t ef_construction, int max_level,
        Element entry, const char* ground, const std::vector<int>& levels, const char* upper
    ) {
        auto made = std::make_unique<Hnsw>(std::move(space), dim, levels.size(), m, ef_construction);
        auto& graph = made->graph;
        graph.maxlevel_ = max_level;
        graph.enterpoint_node_ = entry;
        for (std::size_t e = 0; e < levels.size(); e++) {
            char* record = graph.data_level0_memory_ + e * graph.size_data_per_element_;
            std::memcpy(record, ground + e * graph.offsetData_, graph.offsetData_);
            record[MARK_BYTE] = 0;
            graph.setExternalLabel(Element(e), e);
            if (levels[e] > 0) {
                const std::size_t bytes = std::size_t(levels[e]) * graph.size_links_per_element_;
                // As addPoint asks for it: its walks read a byte too far.
                graph.linkLists_[e] = static_cast<char*>(std::malloc(bytes + 1));
                if (!graph.linkLists_[e]) throw std::bad_alloc();
                std::memcpy(graph.linkLists_[e], upper, bytes);
                upper += bytes;
            }
            graph.element_levels_[e] = levels[e];
            // The destructor frees the lists of so many.
            graph.cur_element_count = e + 1;
        }
        return made;
    }

    std::size_t count() const { return graph.cur_element_count; }

    // Add `count` vectors, one after another in memory, by as many threads.
    void add(const float* vectors, const std::int64_t* names, std::size_t count, std::size_t threads) {
        auto one = [&](std::size_t row) {
            graph.addPoint(vectors + row * space.dim(), hnswlib::labeltype(names[row]));
        };
        std::size_t first = 0;
        // All others are linked to the first.
        if (count && !this->count()) one(first++);
        // So few are not worth a thread.
        if (count <= 4 * threads) threads = 1;
        if (threads <= 1) {
            for (; first < count; first++) one(first);
            return;
        }
        std::atomic<std::size_t> next(first);
        std::exception_ptr failure;
        std::mutex failing;
        auto work = [&] {
            try {
                for (std::size_t row; (row = next++) < count;) one(row);
            } catch (...) {
                const std::lock_guard<std::mutex> lock(failing);
                failure = std::current_exception();
                next = count;
            }
        };
        std::vector<std::thread> others;
        try {
            for (std::size_t i = 1; i < threads; i++) others.emplace_back(work);
        } catch (const std::system_error&) {
            // No more threads can be had: those that run do all of it.
        }
        work();
        for (std::thread& other : others) other.join();
        if (failure) std::rethrow_exception(failure);
    }

    // Names and distances of the `k` nearest to `query`, nearest first. False: fewer were reached.
    bool search(const float* query, std::size_t k, std::int64_t* names, float* distances) const {
        auto found = graph.searchKnn(query, k);
        if (found.size() != k) return false;
        for (std::size_t at = k; at--; found.pop()) {
            names[at] = std::int64_t(found.top().second);
            distances[at] = found.top().first;
        }
        return true;
    }

    // Mark which elements nobody may find: a byte each.
    void mark(const bool* dead) {
        std::size_t marked = 0;
        for (std::size_t e = 0; e < count(); e++) {
            graph.data_level0_memory_[e * graph.size_data_per_element_ + MARK_BYTE] = char(dead[e]);
            marked += dead[e];
        }
        graph.num_deleted_ = marked;
    }

    // The links above the ground, as of_links takes them.
    std::string upper() const {
        std::string found;
        for (std::size_t e = 0; e < count(); e++)
            if (graph.element_levels_[e] > 0)
                found.append(
                    graph.linkLists_[e], std::size_t(graph.element_levels_[e]) * graph.size_links_per_element_
                );
        return found;
    }

    // Advise the kernel on the large pages that lie wholly in the records, one after another. False: it
    // refused one.
    bool advise(int advice) const {
#ifdef __linux__
        constexpr std::uintptr_t page = 2 << 20;
        const auto start = reinterpret_cast<std::uintptr_t>(graph.data_level0_memory_);
        const std::uintptr_t end = start + graph.max_elements_ * graph.size_data_per_element_;
        for (std::uintptr_t at = (start + page - 1) / page * page; at + page <= end; at += page)
            if (madvise(reinterpret_cast<void*>(at), page, advice)) return false;
        return true;
#else
        return false;
#endif
    }

    // Before the graph, which asks it for its distances.
    Space space;
    hnswlib::HierarchicalNSW<float> graph;

  private:
    static constexpr std::size_t REPORT_SEED = 1;
    // Of a record: hnswlib keeps the mark beside the count of links.
    static constexpr std::size_t MARK_BYTE = 2;
};

}  // namespace nobackfill

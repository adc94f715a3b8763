// One call a search, which lets go of the interpreter's lock once. What it reads never changes: a
// Snapshot holds references to the graph and the arrays whose memory it reads, and whoever searches
// holds one to the Snapshot, so that a graph that is retired lives until its last search has ended.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "answer.hpp"
#include "ranking.hpp"
#include "request.hpp"

PYBIND11_MAKE_OPAQUE(std::vector<nobackfill::Curve>)

namespace py = pybind11;
using namespace nobackfill;

namespace {

template <typename T>
using Array = py::array_t<T, py::array::c_style>;
using Mask = std::optional<Array<bool>>;

template <typename T>
const T* data_of(const std::optional<Array<T>>& array, std::size_t count, const char* what) {
    if (!array) return nullptr;
    if (array->ndim() != 1 || std::size_t(array->size()) != count)
        throw py::value_error(std::string(what) + ": expected one value a row");
    return array->data();
}

const std::uint8_t* bytes_of(const Mask& mask, std::size_t count, const char* what) {
    return reinterpret_cast<const std::uint8_t*>(data_of(mask, count, what));
}

// A graph, and which row each of its elements is.
struct PyGraph {
    py::object owner;
    Array<std::int64_t> held_array, labels_array;
    std::optional<Array<std::int64_t>> elements_array;
    Graph graph;
    Metric metric;
    std::size_t rows;
    const std::int64_t* elements;
    const std::int64_t* labels;

    PyGraph(
        py::object owner_, Array<std::int64_t> held, Array<std::int64_t> labels_,
        std::optional<Array<std::int64_t>> elements_
    )
        : owner(std::move(owner_)),
          held_array(std::move(held)),
          labels_array(std::move(labels_)),
          elements_array(std::move(elements_)),
          graph(Graph::of(hnsw(), data_of<std::int64_t>(held_array, hnsw().count(), "held"))),
          metric(hnsw().space.name == "ip" ? Metric::cosine : Metric::squared_l2),
          rows(std::size_t(labels_array.size())),
          elements(data_of(elements_array, rows, "elements")),
          labels(labels_array.data()) {
        if (graph.entry >= graph.count) throw py::value_error("expected a graph with elements");
    }

    const Hnsw& hnsw() const { return owner.cast<const Hnsw&>(); }
};

// Rows of float32 values, one vector each.
const float* vectors_of(const Hnsw& graph, const Array<float>& vectors) {
    if (vectors.ndim() != 2 || std::size_t(vectors.shape(1)) != graph.space.dim())
        throw py::value_error("vectors: expected one row a vector of the graph's dimension");
    return vectors.data();
}

std::unique_ptr<Hnsw> hnsw_of_links(
    std::string space, std::size_t dim, std::size_t m, std::size_t ef_construction, int max_level,
    Element entry, const Array<std::uint8_t>& ground, const Array<int>& levels, const Array<std::int8_t>& upper
) {
    const std::vector<int> all(levels.data(), levels.data() + levels.size());
    std::size_t above = 0;
    for (const int one : all) above += std::size_t(std::max(one, 0));
    if (std::size_t(ground.size()) != all.size() * (4 + 8 * m) || std::size_t(upper.size()) != above * (4 + 4 * m))
        throw py::value_error("links: expected lists of 2 * m and of m links");
    py::gil_scoped_release released;
    return Hnsw::of_links(
        std::move(space), dim, m, ef_construction, max_level, entry,
        reinterpret_cast<const char*>(ground.data()), all, reinterpret_cast<const char*>(upper.data())
    );
}

// Names and distances [q, k]; None: fewer than `k` were reached by one of the queries.
py::object hnsw_search(const Hnsw& graph, const Array<float>& queries, std::size_t k) {
    const float* query = vectors_of(graph, queries);
    const std::size_t count = std::size_t(queries.shape(0));
    Array<std::int64_t> names({count, k});
    Array<float> distances({count, k});
    std::int64_t* names_at = names.mutable_data();
    float* distances_at = distances.mutable_data();
    bool reached = true;
    {
        py::gil_scoped_release released;
        for (std::size_t i = 0; reached && i < count; i++)
            reached = graph.search(query + i * graph.space.dim(), k, names_at + i * k, distances_at + i * k);
    }
    if (!reached) return py::none();
    return py::make_tuple(std::move(names), std::move(distances));
}

void hnsw_add(
    Hnsw& graph, const Array<float>& vectors, const Array<std::int64_t>& names, std::size_t threads
) {
    const float* first = vectors_of(graph, vectors);
    const std::size_t count = std::size_t(vectors.shape(0));
    if (names.ndim() != 1 || std::size_t(names.size()) != count)
        throw py::value_error("names: expected one a vector");
    const std::int64_t* name = names.data();
    py::gil_scoped_release released;
    graph.add(first, name, count, threads);
}

// The records of the elements, uint8 [count, bytes]: the memory itself.
Array<std::uint8_t> hnsw_records(const py::object& of) {
    auto& graph = of.cast<Hnsw&>();
    return Array<std::uint8_t>(
        {graph.count(), graph.graph.size_data_per_element_},
        reinterpret_cast<const std::uint8_t*>(graph.graph.data_level0_memory_), of
    );
}

void bind_hnsw(py::module_& module) {
    py::class_<Hnsw>(module, "Hnsw")
        .def(
            py::init<std::string, std::size_t, std::size_t, std::size_t, std::size_t>(), py::arg("space"),
            py::arg("dim"), py::arg("capacity"), py::arg("m"), py::arg("ef_construction")
        )
        .def_static("of_links", &hnsw_of_links)
        .def_property_readonly("space", [](const Hnsw& of) { return of.space.name; })
        .def_property_readonly("dim", [](const Hnsw& of) { return of.space.dim(); })
        .def_property_readonly("m", [](const Hnsw& of) { return of.graph.M_; })
        .def_property_readonly("ef_construction", [](const Hnsw& of) { return of.graph.ef_construction_; })
        .def_property_readonly("capacity", [](const Hnsw& of) { return of.graph.max_elements_; })
        .def_property_readonly("max_level", [](const Hnsw& of) { return of.graph.maxlevel_; })
        .def_property_readonly("entry", [](const Hnsw& of) { return of.graph.enterpoint_node_; })
        .def_property_readonly("mult", [](const Hnsw& of) { return of.graph.mult_; })
        .def_property(
            "ef", [](const Hnsw& of) { return of.graph.ef_; },
            [](Hnsw& of, std::size_t ef) { of.graph.ef_ = ef; }
        )
        .def_property_readonly("records", &hnsw_records)
        .def_property_readonly(
            "levels",
            [](const Hnsw& of) { return Array<int>(py::ssize_t(of.count()), of.graph.element_levels_.data()); }
        )
        .def_property_readonly(
            "upper",
            [](const Hnsw& of) {
                const std::string found = of.upper();
                return Array<std::int8_t>(
                    py::ssize_t(found.size()), reinterpret_cast<const std::int8_t*>(found.data())
                );
            }
        )
        .def("__len__", &Hnsw::count)
        .def("add", &hnsw_add)
        .def("search", &hnsw_search)
        .def(
            "resize", [](Hnsw& of, std::size_t capacity) { of.graph.resizeIndex(capacity); },
            py::call_guard<py::gil_scoped_release>()
        )
        .def("mark", [](Hnsw& of, const Array<bool>& dead) {
            if (std::size_t(dead.size()) != of.count()) throw py::value_error("dead: expected one an element");
            of.mark(dead.data());
        })
        .def("advise", &Hnsw::advise, py::call_guard<py::gil_scoped_release>());
}

struct PySnapshot {
    Snapshot snapshot;
    py::object graph;
    Mask live, delta_live;
    Array<float> delta_vectors;
    Array<std::int64_t> delta_labels;

    PySnapshot(
        py::object graph_, bool unit, std::size_t ef, Mask live_, Array<float> vectors, Array<std::int64_t> labels,
        Mask delta_live_
    )
        : graph(std::move(graph_)),
          live(std::move(live_)),
          delta_live(std::move(delta_live_)),
          delta_vectors(std::move(vectors)),
          delta_labels(std::move(labels)) {
        const auto& of = graph.cast<const PyGraph&>();
        const std::size_t count = std::size_t(delta_labels.size());
        if (delta_vectors.ndim() != 2 || std::size_t(delta_vectors.shape(0)) != count ||
            std::size_t(delta_vectors.shape(1)) != of.graph.dim)
            throw py::value_error("delta: expected a vector a label");
        snapshot = Snapshot{
            of.metric, unit, of.graph, of.labels, of.elements, of.rows,
            bytes_of(live, of.rows, "live"), ef,
            Rows{delta_vectors.data(), delta_labels.data(), count,
                 Masks{bytes_of(delta_live, count, "delta_live"), nullptr}},
        };
    }

    // A vector's bytes, checked and prepared; empty: refused.
    std::vector<float> query(const char* values, std::size_t size) const {
        std::vector<float> found;
        if (size != 4 * snapshot.graph.dim) return found;
        found.resize(snapshot.graph.dim);
        std::memcpy(found.data(), values, size);
        if (!prepare(snapshot.metric, snapshot.unit, found)) found.clear();
        return found;
    }

    py::object search(
        const Array<float>& vector, std::size_t k, std::size_t asked, const Mask& base,
        const Mask& beside
    ) const {
        const std::uint8_t* chosen = bytes_of(base, snapshot.rows, "base");
        const std::uint8_t* rest = bytes_of(beside, snapshot.delta.count, "beside");
        std::optional<std::vector<Found>> found;
        const char* values = reinterpret_cast<const char*>(vector.data());
        const std::size_t size = std::size_t(vector.nbytes());
        {
            py::gil_scoped_release released;
            const std::vector<float> prepared = query(values, size);
            if (!prepared.empty() && k) found = snapshot.nearest(prepared, k, std::max(k, asked), chosen, rest);
        }
        if (!found) return py::none();
        Array<std::int64_t> labels({py::ssize_t(1), py::ssize_t(k)});
        Array<float> distances({py::ssize_t(1), py::ssize_t(k)});
        for (std::size_t i = 0; i < k; i++) {
            const bool there = i < found->size();
            labels.mutable_data()[i] = there ? (*found)[i].label : -1;
            distances.mutable_data()[i] =
                there ? (*found)[i].distance : std::numeric_limits<float>::infinity();
        }
        return py::make_tuple(std::move(labels), std::move(distances));
    }

    // To each of `queries` (values, k, how many to ask the graph for, farthest): the hits of a
    // SearchResponse, then `end`; none: a hit is not `known`, or ask in Python why.
    py::list answers(
        const py::list& queries, bool exact, const py::dict& known,
        const std::vector<Curve>& curves, const py::bytes& end
    ) const;
};

std::string_view text_of(PyObject* bytes) {
    if (!PyBytes_Check(bytes)) throw py::type_error("expected bytes");
    return {PyBytes_AS_STRING(bytes), std::size_t(PyBytes_GET_SIZE(bytes))};
}

// One of them; `query` holds its values.
struct Asked {
    std::string_view values;
    std::size_t k, asked;
    double farthest;
    std::optional<std::vector<Found>> found;

    static Asked of(py::handle query) {
        const auto parts = query.cast<py::tuple>();
        if (parts.size() != 4) throw py::value_error("expected values, k, asked, farthest");
        return {text_of(parts[0].ptr()), parts[1].cast<std::size_t>(),
                parts[2].cast<std::size_t>(), parts[3].cast<double>(), std::nullopt};
    }
};

// None: a hit is not known.
py::object joined(
    const Asked& one, const py::dict& known, const std::vector<Curve>& curves, std::string_view end
) {
    std::string bytes;
    bytes.reserve(4096);
    for (const Found& hit : *one.found) {
        const py::int_ label(hit.label);
        PyObject* parts = PyDict_GetItemWithError(known.ptr(), label.ptr());
        if (!parts || !PyTuple_Check(parts) || PyTuple_GET_SIZE(parts) != 5) {
            if (PyErr_Occurred()) throw py::error_already_set();
            return py::none();
        }
        // They come nearest first, and rounding keeps the order.
        if (!(double(hit.distance) <= one.farthest)) continue;
        const auto origin = py::handle(PyTuple_GET_ITEM(parts, 3)).cast<std::size_t>();
        const bool scored = origin < curves.size() && !curves[origin].distances.empty();
        const bool beyond = scored && curves[origin].beyond(hit.distance);
        bytes += text_of(PyTuple_GET_ITEM(parts, beyond ? 4 : scored ? 0 : 1));
        put(bytes, 0x15, hit.distance);
        if (scored) put(bytes, 0x1D, float(curves[origin].score(hit.distance)));
        bytes += text_of(PyTuple_GET_ITEM(parts, 2));
        if (beyond) bytes.append("\x38\x01", 2);
    }
    bytes += end;
    return py::bytes(bytes);
}

// What is asked (no `k`: nothing) is found, without the lock, and told: the hits, then `end`.
py::list answered(
    const PySnapshot& of, std::vector<Asked>& all, bool exact, const py::dict& known,
    const std::vector<Curve>& curves, const py::bytes& end
) {
    {
        py::gil_scoped_release released;
        for (Asked& one : all) {
            if (!one.k) continue;
            const std::vector<float> prepared = of.query(one.values.data(), one.values.size());
            if (!prepared.empty())
                one.found = of.snapshot.nearest(prepared, one.k, std::max(one.k, one.asked), nullptr, nullptr);
            if (one.found && !exact)
                for (Found& hit : *one.found) hit.distance = rounded(hit.distance);
        }
    }
    py::list made(all.size());
    for (std::size_t i = 0; i < all.size(); i++)
        made[i] = all[i].found ? joined(all[i], known, curves, text_of(end.ptr())) : py::none();
    return made;
}

py::list PySnapshot::answers(
    const py::list& queries, bool exact, const py::dict& known, const std::vector<Curve>& curves,
    const py::bytes& end
) const {
    // The list may be changed while the lock is not held: what it holds is held here.
    const py::tuple held(queries);
    std::vector<Asked> all;
    all.reserve(held.size());
    for (const py::handle query : held) all.push_back(Asked::of(query));
    return answered(*this, all, exact, known, curves, end);
}

// From messages to answers, for one space of one gallery: while nothing changes that answers in it
// have in common.
struct PyRoute {
    py::object snapshot;
    std::string gallery, space;
    std::size_t usual_k, most_k;
    bool exact;
    // How many a query for k asks the graph for; none or None: in Python.
    py::dict walked, known;
    py::object curves;
    py::bytes end;

    py::list answers(const py::list& messages) const {
        const py::tuple held(messages);
        std::vector<Asked> all;
        all.reserve(held.size());
        for (const py::handle message : held) all.push_back(asked(text_of(message.ptr())));
        return answered(
            snapshot.cast<const PySnapshot&>(), all, exact, known,
            curves.cast<const std::vector<Curve>&>(), end
        );
    }

    Asked asked(std::string_view message) const {
        const Asked none{{}, 0, 0, 0, std::nullopt};
        const auto found = parse(message);
        if (!found || found->space != space || found->gallery != gallery) return none;
        const double farthest =
            found->farthest ? double(*found->farthest) : std::numeric_limits<double>::infinity();
        const std::size_t k = found->k ? found->k : usual_k;
        if (k > most_k || farthest != farthest) return none;
        const py::int_ number(k);
        PyObject* walks = PyDict_GetItemWithError(walked.ptr(), number.ptr());
        if (!walks && PyErr_Occurred()) throw py::error_already_set();
        if (!walks || !PyLong_Check(walks)) return none;
        return {found->values, k, py::handle(walks).cast<std::size_t>(), farthest, std::nullopt};
    }
};

// Labels and distances [1, k] of rows of a database, label and vector each; -1 and infinity: nobody's.
// None: Python is to rank them.
py::object ranked_rows(bool cosine, const Array<float>& query, const py::list& rows, std::size_t k) {
    std::vector<Candidate> candidates;
    candidates.reserve(rows.size());
    for (const py::handle row : rows) {
        const auto pair = py::reinterpret_borrow<py::sequence>(row);
        const Candidate one{pair[0].cast<std::int64_t>(), text_of(py::object(pair[1]).ptr())};
        if (one.bytes.size() != SIZED + 4 * std::size_t(query.size()))
            throw py::value_error("rows: expected vectors of the query's dimensions");
        candidates.push_back(one);
    }
    const Metric metric = cosine ? Metric::cosine : Metric::squared_l2;
    const auto found = ranked(metric, {query.data(), query.data() + query.size()}, candidates, k);
    if (!found) return py::none();
    Array<std::int64_t> labels({std::size_t(1), k});
    Array<float> distances({std::size_t(1), k});
    for (std::size_t i = 0; i < k; i++) {
        const bool there = i < found->size();
        labels.mutable_data()[i] = there ? (*found)[i].label : -1;
        distances.mutable_data()[i] =
            there ? (*found)[i].distance : std::numeric_limits<float>::infinity();
    }
    return py::make_tuple(labels, distances);
}

}  // namespace

PYBIND11_MODULE(_native, module) {
    module.def("ranked", &ranked_rows);
    bind_hnsw(module);
    py::class_<PyGraph>(module, "Graph")
        .def(py::init<py::object, Array<std::int64_t>, Array<std::int64_t>,
                      std::optional<Array<std::int64_t>>>());
    py::class_<std::vector<Curve>>(module, "Curves")
        .def(py::init([](const py::dict& curves) {
            std::vector<Curve> made(8);
            for (const auto& [origin, curve] : curves) {
                const auto pair = curve.cast<std::pair<std::vector<double>, std::vector<double>>>();
                made.at(origin.cast<std::size_t>()) = {pair.first, pair.second};
            }
            return made;
        }));
    py::class_<PySnapshot>(module, "Snapshot")
        .def(py::init<py::object, bool, std::size_t, Mask, Array<float>, Array<std::int64_t>, Mask>())
        .def("search", &PySnapshot::search)
        .def("answers", &PySnapshot::answers);
    py::class_<PyRoute>(module, "Route")
        .def(py::init([](py::object snapshot, std::string gallery, std::string space,
                         std::size_t usual_k, std::size_t most_k, bool exact, py::dict walked,
                         py::dict known, py::object curves, py::bytes end) {
            snapshot.cast<const PySnapshot&>();
            curves.cast<const std::vector<Curve>&>();
            return PyRoute{std::move(snapshot), std::move(gallery), std::move(space), usual_k, most_k,
                           exact, std::move(walked), std::move(known), std::move(curves),
                           std::move(end)};
        }))
        .def("answers", &PyRoute::answers);
    // A search by one embedding: gallery, space, values, k, farthest (infinity: none is); by one image:
    // its bytes, and None for a space; None: it is another, or none.
    module.def("parse", [](const py::bytes& message) -> py::object {
        const auto found = parse(text_of(message.ptr()));
        if (!found) return py::none();
        const auto text = [](std::string_view part) {
            PyObject* made = PyUnicode_DecodeUTF8(part.data(), py::ssize_t(part.size()), nullptr);
            if (!made) PyErr_Clear();
            return py::reinterpret_steal<py::object>(made);
        };
        const py::object gallery = text(found->gallery);
        const py::object space = found->space.empty() ? py::none() : text(found->space);
        if (!gallery || !space) return py::none();
        const double farthest =
            found->farthest ? double(*found->farthest) : std::numeric_limits<double>::infinity();
        return py::make_tuple(
            gallery, space, py::bytes(found->values.data(), found->values.size()), found->k, farthest
        );
    });
}

// The bytes of a SearchRequest with one embedding, or one image, and nothing that needs more than a
// search.
#pragma once

#include <cstdint>
#include <cstring>
#include <optional>
#include <string_view>

namespace nobackfill {

struct Request {
    // An image has no space.
    std::string_view gallery, space, values;
    std::uint32_t k = 0;
    std::optional<float> farthest;
};

// Fields of a message, one after the other. What is not read here, or not whole, ends it with `good`
// false: protobuf's own parser says what is wrong with it, or that nothing is.
class Fields {
  public:
    explicit Fields(std::string_view bytes) : left_(bytes) {}

    bool next() {
        std::uint64_t tag;
        if (left_.empty() || !varint(tag)) return false;
        number = tag >> 3;
        kind = int(tag & 7);
        if (kind == 0) return varint(value);
        if (kind == 5) {
            if (left_.size() < 4) return fail();
            std::memcpy(&bits, left_.data(), 4);
            left_.remove_prefix(4);
            return true;
        }
        std::uint64_t length;
        if (kind != 2) return fail();
        if (!varint(length)) return false;
        if (length > left_.size()) return fail();
        bytes = left_.substr(0, length);
        left_.remove_prefix(length);
        return true;
    }

    std::uint64_t number = 0, value = 0;
    int kind = 0;
    std::uint32_t bits = 0;
    std::string_view bytes;
    bool good = true;

  private:
    bool fail() { return good = false; }

    bool varint(std::uint64_t& into) {
        into = 0;
        for (int shift = 0; shift < 35; shift += 7) {
            if (left_.empty()) return fail();
            const auto byte = std::uint8_t(left_.front());
            left_.remove_prefix(1);
            into |= std::uint64_t(byte & 0x7F) << shift;
            if (byte < 0x80) return true;
        }
        return fail();
    }

    std::string_view left_;
};

// The one field `number` of a message that has no other.
inline std::optional<std::string_view> only(std::string_view message, std::uint64_t number) {
    Fields fields(message);
    std::optional<std::string_view> found;
    while (fields.next()) {
        if (fields.number != number || fields.kind != 2 || found) return std::nullopt;
        found = fields.bytes;
    }
    return fields.good ? found : std::nullopt;
}

// The first and only of Embeddings.embeddings.
inline bool read_embedding(std::string_view embeddings, Request& request) {
    const auto embedding = only(embeddings, 1);
    if (!embedding) return false;
    Fields fields(*embedding);
    while (fields.next()) {
        if (fields.kind != 2) return false;
        if (fields.number == 1 && request.space.empty()) request.space = fields.bytes;
        else if (fields.number == 2 && request.values.empty()) request.values = fields.bytes;
        else return false;
    }
    return fields.good && !request.space.empty();
}

// Query.image or Query.embeddings, which exclude each other.
inline bool read_query(std::string_view query, Request& request) {
    if (const auto embeddings = only(query, 2)) return read_embedding(*embeddings, request);
    const auto image = only(query, 1);
    if (!image || image->empty()) return false;
    request.values = *image;
    return true;
}

inline std::optional<Request> parse(std::string_view message) {
    Request request;
    Fields fields(message);
    bool queried = false;
    while (fields.next()) {
        if (fields.number == 1 && fields.kind == 2 && request.gallery.empty()) {
            request.gallery = fields.bytes;
        } else if (fields.number == 2 && fields.kind == 2 && !queried) {
            queried = read_query(fields.bytes, request);
            if (!queried) return std::nullopt;
        } else if (fields.number == 3 && fields.kind == 0 && !request.k) {
            if (fields.value > 0xFFFFFFFFu) return std::nullopt;
            request.k = std::uint32_t(fields.value);
        } else if (fields.number == 6 && fields.kind == 5 && !request.farthest) {
            float farthest;
            std::memcpy(&farthest, &fields.bits, 4);
            request.farthest = farthest;
        } else {
            return std::nullopt;
        }
    }
    if (!fields.good || !queried || request.gallery.empty()) return std::nullopt;
    return request;
}

}  // namespace nobackfill

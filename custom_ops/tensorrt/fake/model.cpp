#include "model.h"

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>

namespace fake {

namespace {

// One field of a message: a number, or the bytes of a nested one.
struct Field {
    std::uint64_t number = 0;
    std::uint64_t value = 0;
    std::string bytes;
};

class Reader {
public:
    explicit Reader(const std::string &bytes) : bytes_(bytes) {}

    // Calls `visit` with each field; false where the bytes are no message.
    bool each(const std::function<bool(const Field &)> &visit) {
        while (at_ < bytes_.size()) {
            std::uint64_t key = 0;
            Field field;
            if (!varint(key)) return false;
            field.number = key >> 3;
            const bool is_read = (key & 7) == 0   ? varint(field.value)
                                 : (key & 7) == 2 ? varint(field.value) && take(field.value, field.bytes)
                                 : (key & 7) == 5 ? take(4, field.bytes)
                                 : (key & 7) == 1 ? take(8, field.bytes)
                                                  : false;
            if (!is_read || !visit(field)) return false;
        }
        return true;
    }

    bool varint(std::uint64_t &value) {
        value = 0;
        for (unsigned shift = 0; shift < 64 && at_ < bytes_.size(); shift += 7) {
            const auto byte = static_cast<unsigned char>(bytes_[at_++]);
            value |= static_cast<std::uint64_t>(byte & 0x7F) << shift;
            if (byte < 0x80) return true;
        }
        return false;
    }
    bool is_done() const { return at_ == bytes_.size(); }

private:
    bool take(std::uint64_t count, std::string &taken) {
        if (count > bytes_.size() - at_) return false;
        taken = bytes_.substr(at_, count);
        at_ += count;
        return true;
    }

    const std::string &bytes_;
    std::size_t at_ = 0;
};

bool read_dims(const Field &field, std::vector<std::int64_t> &dims) {
    if (field.bytes.empty()) return dims.push_back(static_cast<std::int64_t>(field.value)), true;
    Reader packed(field.bytes);
    for (std::uint64_t dim = 0; !packed.is_done();) {
        if (!packed.varint(dim)) return false;
        dims.push_back(static_cast<std::int64_t>(dim));
    }
    return true;
}

bool read_external(const std::string &folder, const std::vector<std::pair<std::string, std::string>> &entries,
                   std::string &bytes) {
    std::string location;
    std::uint64_t offset = 0, length = 0;
    for (const auto &[key, value] : entries) {
        if (key == "location") location = value;
        if (key == "offset") offset = std::strtoull(value.c_str(), nullptr, 10);
        if (key == "length") length = std::strtoull(value.c_str(), nullptr, 10);
    }
    std::ifstream file(folder + "/" + location, std::ios::binary);
    file.seekg(static_cast<std::streamoff>(offset));
    bytes.resize(length);
    return static_cast<bool>(file.read(bytes.data(), static_cast<std::streamsize>(length)));
}

bool read_constant(const std::string &bytes, const std::string &folder, Value &made) {
    std::vector<std::pair<std::string, std::string>> external;
    const bool is_read = Reader(bytes).each([&](const Field &field) {
        if (field.number == 1) return read_dims(field, made.dims);
        if (field.number == 2) made.element = static_cast<std::int32_t>(field.value);
        if (field.number == 8) made.name = field.bytes;
        if (field.number == 4 || field.number == 9) made.bytes = field.bytes;
        if (field.number != 13) return true;
        auto &entry = external.emplace_back();
        return Reader(field.bytes).each([&](const Field &part) {
            (part.number == 1 ? entry.first : entry.second) = part.bytes;
            return true;
        });
    });
    return is_read && (external.empty() || read_external(folder, external, made.bytes));
}

bool read_value(const std::string &bytes, Value &made) {
    const auto dimension = [&](const Field &field) {
        std::int64_t size = -1;
        if (field.number != 1) return true;
        const bool is_read = Reader(field.bytes).each([&](const Field &part) {
            if (part.number == 1) size = static_cast<std::int64_t>(part.value);
            return true;
        });
        made.dims.push_back(size);
        return is_read;
    };
    const auto tensor = [&](const Field &field) {
        if (field.number == 1) made.element = static_cast<std::int32_t>(field.value);
        return field.number != 2 || Reader(field.bytes).each(dimension);
    };
    return Reader(bytes).each([&](const Field &field) {
        if (field.number == 1) made.name = field.bytes;
        if (field.number != 2) return true;
        return Reader(field.bytes).each([&](const Field &type) {
            return type.number != 1 || Reader(type.bytes).each(tensor);
        });
    });
}

bool read_attribute(const std::string &bytes, Attribute &made) {
    return Reader(bytes).each([&](const Field &field) {
        if (field.number == 1) made.name = field.bytes;
        if (field.number == 2 && field.bytes.size() == 4) std::memcpy(&made.real, field.bytes.data(), 4);
        if (field.number == 3) made.integer = static_cast<std::int64_t>(field.value);
        if (field.number == 4) made.text = field.bytes;
        if (field.number == 20) made.type = static_cast<std::int32_t>(field.value);
        return true;
    });
}

bool read_node(const std::string &bytes, Node &made) {
    return Reader(bytes).each([&](const Field &field) {
        if (field.number == 1) made.inputs.push_back(field.bytes);
        if (field.number == 2) made.outputs.push_back(field.bytes);
        if (field.number == 3) made.name = field.bytes;
        if (field.number == 4) made.op = field.bytes;
        return field.number != 5 || read_attribute(field.bytes, made.attributes.emplace_back());
    });
}

}  // namespace

bool read_model(const std::string &bytes, const std::string &folder, Model &model) {
    bool has_graph = false;
    const auto graph = [&](const Field &field) {
        switch (field.number) {
            case 1: return read_node(field.bytes, model.nodes.emplace_back());
            case 5: return read_constant(field.bytes, folder, model.constants.emplace_back());
            case 11: return read_value(field.bytes, model.inputs.emplace_back());
            case 12: return read_value(field.bytes, model.outputs.emplace_back());
            default: return true;
        }
    };
    const bool is_read = Reader(bytes).each([&](const Field &field) {
        if (field.number != 7) return true;
        has_graph = true;
        return Reader(field.bytes).each(graph);
    });
    return is_read && has_graph;
}

}  // namespace fake

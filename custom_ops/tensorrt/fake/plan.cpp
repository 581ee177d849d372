#include "plan.h"

#include <cstring>

namespace fake {

namespace {

constexpr char magic[] = "moa fake plan";

void put(std::string &bytes, std::int64_t number) { bytes.append(reinterpret_cast<const char *>(&number), sizeof number); }
void put(std::string &bytes, const std::string &text) {
    put(bytes, static_cast<std::int64_t>(text.size()));
    bytes += text;
}
void put(std::string &bytes, const nvinfer1::Dims &dims) {
    put(bytes, std::int64_t{dims.nbDims});
    for (std::int32_t axis = 0; axis < dims.nbDims; ++axis) put(bytes, std::int64_t{dims.d[axis]});
}

class Reader {
public:
    explicit Reader(const std::string &bytes) : bytes_(bytes) {}

    std::int64_t number() {
        std::int64_t value = 0;
        std::memcpy(&value, take(sizeof value).data(), sizeof value);
        return value;
    }
    std::string text() { return take(static_cast<std::uint64_t>(number())); }
    nvinfer1::Dims dims() {
        std::vector<std::int64_t> sizes(static_cast<std::size_t>(number()));
        for (auto &size : sizes) size = number();
        return dims_of(sizes);
    }
    void end() const {
        if (at_ != bytes_.size()) throw Refused("Serialization assertion size == read failed.");
    }

private:
    std::string take(std::uint64_t count) {
        if (count > bytes_.size() - at_) throw Refused("Serialization assertion sizeRead == static_cast<uint64_t>(mEnd - mCurrent) failed.Size specified in header does not match archive size");
        at_ += count;
        return bytes_.substr(at_ - count, count);
    }

    const std::string &bytes_;
    std::uint64_t at_ = 0;
};

std::string of(int number) { return std::to_string(number / 10) + "." + std::to_string(number % 10); }

}  // namespace

std::string Plan::to_bytes() const {
    std::string bytes;
    put(bytes, std::string(magic));
    put(bytes, std::int64_t{version()});
    put(bytes, std::int64_t{capability()});
    put(bytes, graph.bytes);
    put(bytes, graph.folder);
    put(bytes, told);
    put(bytes, static_cast<std::int64_t>(profiles.size()));
    for (const Profile &profile : profiles) {
        put(bytes, static_cast<std::int64_t>(profile.size()));
        for (const auto &[name, range] : profile) {
            put(bytes, name);
            for (const auto &dims : {range.least, range.usual, range.most}) put(bytes, dims);
        }
    }
    for (std::size_t index = 0; index < graph.plugins.size(); ++index) {
        put(bytes, graph.plugins[index]->state());
        put(bytes, static_cast<std::int64_t>(workspaces[index]));
    }
    return bytes;
}

Plan Plan::from_bytes(const std::string &bytes) {
    Reader reader(bytes);
    if (bytes.size() < 8 || reader.text() != magic) throw Refused("Serialization assertion magicTagRead == kMAGIC_TAG failed.Magic tag does not match");
    const auto built_for = reader.number(), built_on = reader.number();
    if (built_for != version()) {
        throw Refused("The engine plan file is not compatible with this version of TensorRT, expecting library version " +
                      std::to_string(version()) + " got " + std::to_string(built_for) + ", please rebuild.");
    }
    if (built_on != capability()) {
        throw Refused("The engine plan file is generated on an incompatible device, expecting compute " + of(capability()) +
                      " got compute " + of(static_cast<int>(built_on)) + ", please rebuild.");
    }
    Plan plan;
    plan.graph.bytes = reader.text();
    plan.graph.folder = reader.text();
    plan.told = reader.text();
    plan.profiles.resize(static_cast<std::size_t>(reader.number()));
    for (Profile &profile : plan.profiles) {
        for (auto count = reader.number(); count > 0; --count) {
            Range &range = profile[reader.text()];
            for (auto *dims : {&range.least, &range.usual, &range.most}) *dims = reader.dims();
        }
    }
    if (!read_model(plan.graph.bytes, plan.graph.folder, plan.graph.model)) throw Refused("the plan holds no model");
    for (const Node &node : plan.graph.model.nodes) {
        if (is_told("forget")) throw Refused("getPluginCreator could not find plugin: " + node.op);
        plan.graph.plugins.push_back(Instance::of_state(registry(), node, reader.text()));
        plan.workspaces.push_back(static_cast<std::size_t>(reader.number()));
    }
    reader.end();
    return plan;
}

}  // namespace fake

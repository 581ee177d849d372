// A host that plays TensorRT: tests, and one face for both plugin interfaces.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "contract.h"
#include "fakes/control.h"
#include "harness.h"
#include "nvinfer.h"

namespace host {

using nvinfer1::DataType;
using nvinfer1::Dims;

// What the plugin logged, and what the fakes noted, since the last time.
std::string taken_log();
void logged_again(const std::string &text);
std::vector<std::string> taken_notes();

// Everything as at the start of a test.
void reset();

void *library();
std::string library_path();
std::string program();

// Configures one plugin and prints what it logs: a process of its own, for what happens once in a process.
int configure_alone();

// Fields

struct Fields {
    struct Field {
        std::string name;
        nvinfer1::PluginFieldType type;
        std::vector<unsigned char> data;
        std::int32_t length;
    };

    Fields &integer(const std::string &name, std::int32_t value);
    Fields &real(const std::string &name, float value);
    Fields &text(const std::string &name, const std::string &value);
    Fields &without(const std::string &name);
    Fields &raw(const std::string &name, nvinfer1::PluginFieldType type, const void *data, std::size_t bytes,
                std::int32_t length);

    std::vector<Field> all;
};

// What an exporter writes for operator `index`: 3 of the experts, 2 heads.
Fields legal_fields(std::size_t index);

// Shapes

using Sizes = std::vector<std::int64_t>;
Dims dims(const Sizes &sizes);

// Shapes of the first `count` inputs of operator `index`; B=2, C=16, E=6, G=2, D=4, F=5.
std::vector<Sizes> legal_shapes(std::size_t index, std::size_t count, std::int64_t tokens, std::int64_t others);
std::vector<DataType> legal_types(std::size_t index, std::size_t count, DataType activation);

// Plugins

class Plugin {
public:
    virtual ~Plugin() = default;
    virtual std::string name() const = 0;
    virtual std::string version() const = 0;
    virtual std::string space() const = 0;
    virtual std::int32_t outputs() const = 0;
    virtual std::optional<std::vector<DataType>> types(const std::vector<DataType> &inputs) const = 0;
    // Symbols below 0 are dimensions that are not constant; outputs are written as texts.
    virtual std::optional<std::vector<std::string>> shapes(const std::vector<Sizes> &inputs) = 0;
    virtual bool supports(std::int32_t position, const std::vector<nvinfer1::PluginTensorDesc> &tensors,
                          std::int32_t inputs) = 0;
    virtual bool configure(const std::vector<DataType> &types, const std::vector<Sizes> &least,
                           const std::vector<Sizes> &most) = 0;
    virtual std::size_t workspace() const = 0;
    virtual std::string identity() = 0;
    virtual std::vector<unsigned char> state() = 0;
    virtual std::unique_ptr<Plugin> clone() = 0;
    virtual std::unique_ptr<Plugin> attached() = 0;
    // False where the plugin refuses.
    virtual bool shapes_change(const std::vector<DataType> &types, const std::vector<Sizes> &shapes) = 0;
    virtual bool enqueue(const std::vector<DataType> &types, const std::vector<Sizes> &shapes,
                         const std::vector<const void *> &inputs, const std::vector<void *> &outputs, void *workspace,
                         void *stream) = 0;
};

std::vector<std::string> creator_names();
std::vector<std::string> creator_fields(std::size_t index);
std::unique_ptr<Plugin> create(std::size_t index, const Fields &fields);
std::unique_ptr<Plugin> create_from_nothing(std::size_t index);
std::unique_ptr<Plugin> restore(std::size_t index, const std::vector<unsigned char> &state);

nvinfer1::PluginTensorDesc tensor(DataType type, const Sizes &shape);

}  // namespace host

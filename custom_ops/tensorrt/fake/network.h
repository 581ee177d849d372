// The fake's network, which the fake parser fills.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "instance.h"
#include "table.h"

namespace fake {

// What MOA_FAKE_TENSORRT asks for, a list of WORD or WORD=NUMBER with commas between: faults, versions, devices.
bool is_told(const std::string &word);
int number_told(const std::string &word, int otherwise);

// TensorRT's version, and ten times the compute capability of the device; both can be told.
int version();
int capability();

// Sends an error to the logger, and to the recorder where there is one.
void report(nvinfer1::ErrorCode code, const std::string &text);

nvinfer1::IPluginRegistry &registry();

nvinfer1::DataType type_of(std::int32_t element);
nvinfer1::Dims dims_of(const std::vector<std::int64_t> &sizes);

// Type and shape of every value of a model, by name.
using Known = std::map<std::string, std::pair<nvinfer1::DataType, nvinfer1::Dims>>;

// A model and the plugins of its nodes.
struct Graph {
    std::string bytes, folder;
    Model model;
    std::vector<std::unique_ptr<Instance>> plugins;

    // What follows from the shapes of the inputs; throws Refused.
    Known known(const std::map<std::string, nvinfer1::Dims> &inputs) const;
};

class Tensor final : public nvinfer1::ITensor {
public:
    Tensor(std::string name, nvinfer1::DataType type, nvinfer1::Dims dims);

    std::string name;
    nvinfer1::DataType type;
    nvinfer1::Dims dims;

private:
    Face<nvinfer1::apiv::VTensor, Tensor> face_;
};

#if MOA_PLUGIN_V2
using AnyLayer = nvinfer1::IPluginV2Layer;
#else
using AnyLayer = nvinfer1::ILayer;
#endif

class Layer final : public AnyLayer {
public:
    Layer(std::vector<Tensor *> inputs, std::vector<Tensor *> outputs, const Instance &instance, const Node &node);

    std::vector<Tensor *> inputs, outputs;
    const Instance &instance;
    bool is_plugin, moves_alone;
    // What a network of 8.6 was told; -1: nothing.
    std::int32_t precision = -1;
    std::vector<std::int32_t> output_types;

private:
    Face<nvinfer1::apiv::VLayer, Layer> face_;
#if MOA_PLUGIN_V2
    Face<nvinfer1::apiv::VPluginV2Layer, Layer> plugin_face_;
#endif
};

struct Problem {
    nvonnxparser::ErrorCode code;
    std::int32_t node;
    std::string name, op, text;
};

class Network final : public nvinfer1::INetworkDefinition {
public:
    explicit Network(std::uint32_t flags);

    // Reads a model and makes its plugins; the problems, of which there are none where that worked.
    std::vector<Problem> fill(const std::string &bytes, const std::string &folder);

    std::uint32_t flags;
    std::deque<Tensor> tensors;
    std::deque<Layer> layers;
    std::vector<Tensor *> inputs;
    Graph graph;

private:
    Face<nvinfer1::apiv::VNetworkDefinition, Network> face_;
};

}  // namespace fake

// TensorRT's expressions over dimensions, written down as text.
#pragma once

#include <limits>
#include <list>
#include <string>

#include "host.h"

namespace host {

using Value = decltype(std::declval<const nvinfer1::IDimensionExpr &>().getConstantValue());

class Expression final : public nvinfer1::IDimensionExpr, public nvinfer1::apiv::VDimensionExpr {
public:
    Expression(std::string text, std::optional<std::int64_t> value) : text(std::move(text)), value(value) {
        this->mImpl = this;
    }
    bool isConstant() const noexcept override { return value.has_value(); }
    Value getConstantValue() const noexcept override {
        return value ? static_cast<Value>(*value) : std::numeric_limits<Value>::min();
    }
#if NV_TENSORRT_MAJOR >= 10
    bool isSizeTensor() const noexcept override { return false; }
#endif

    std::string text;
    std::optional<std::int64_t> value;
};

class Expressions final : public nvinfer1::IExprBuilder, public nvinfer1::apiv::VExprBuilder {
public:
    Expressions() { this->mImpl = this; }

    const Expression *make(std::string text, std::optional<std::int64_t> value) {
        return &all_.emplace_back(std::move(text), value);
    }
    const nvinfer1::IDimensionExpr *constant(Value value) noexcept override {
        return make(std::to_string(value), value);
    }
    const nvinfer1::IDimensionExpr *operation(nvinfer1::DimensionOperation operation,
                                              const nvinfer1::IDimensionExpr &first,
                                              const nvinfer1::IDimensionExpr &second) noexcept override {
        const auto &left = static_cast<const Expression &>(first);
        const auto &right = static_cast<const Expression &>(second);
        const bool is_sum = operation == nvinfer1::DimensionOperation::kSUM;
        if (left.value && right.value) {
            return constant(static_cast<Value>(is_sum ? *left.value + *right.value : *left.value / *right.value));
        }
        return make("(" + left.text + (is_sum ? " + " : " / ") + right.text + ")", {});
    }
#if NV_TENSORRT_MAJOR >= 10
    const nvinfer1::IDimensionExpr *declareSizeTensor(std::int32_t, const nvinfer1::IDimensionExpr &,
                                                      const nvinfer1::IDimensionExpr &) noexcept override {
        return nullptr;
    }
#endif

    nvinfer1::DimsExprs shape(const Sizes &sizes) {
        static const char *const names[] = {"", "B", "T", "P", "K", "W"};
        nvinfer1::DimsExprs made{};
        for (const std::int64_t size : sizes) {
            made.d[made.nbDims++] = size >= 0 ? make(std::to_string(size), size) : make(names[-size], {});
        }
        return made;
    }
    static std::string text(const nvinfer1::DimsExprs &shape) {
        std::string found;
        for (std::int32_t axis = 0; axis < shape.nbDims; ++axis) {
            found += (axis ? ", " : "") + static_cast<const Expression *>(shape.d[axis])->text;
        }
        return "[" + found + "]";
    }

private:
    std::list<Expression> all_;
};

}  // namespace host

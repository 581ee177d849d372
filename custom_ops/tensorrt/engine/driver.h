// The CUDA driver, opened when first needed, and what the shim holds of it.
#pragma once

#include <cstdint>
#include <memory>

#include "error.h"

namespace moa::engine {

// The primary context of one device, for as long as something holds it.
class Device {
public:
    // Throws Error where there is no driver or no such device.
    static std::shared_ptr<Device> open(std::int32_t ordinal);

    ~Device();
    Device(const Device &) = delete;
    Device &operator=(const Device &) = delete;

    // The newest CUDA that the driver serves: 12090 is 12.9.
    static int driver_version();
    static void describe(std::int32_t ordinal, moa_trt_device &device);

private:
    friend class Current;
    Device(std::int32_t handle, void *context) : handle_(handle), context_(context) {}

    std::int32_t handle_;
    void *context_;
};

// Makes a device's context current on this thread, and afterwards the former one.
class Current {
public:
    explicit Current(const Device &device);
    ~Current();
    Current(const Current &) = delete;
    Current &operator=(const Current &) = delete;
};

// What follows is made and destroyed while its device is current.

class Stream {
public:
    Stream();
    ~Stream();
    Stream(const Stream &) = delete;
    Stream &operator=(const Stream &) = delete;

    void synchronize() const;
    // Whatever is put on the stream until `end_capture` goes into a graph.
    void begin_capture() const;
    void *end_capture() const;
    void *handle() const { return handle_; }

private:
    void *handle_ = nullptr;
};

class Event {
public:
    Event();
    ~Event();
    Event(const Event &) = delete;
    Event &operator=(const Event &) = delete;

    void record(const Stream &stream) const;
    // Waits for the event; the milliseconds since `start`.
    float since(const Event &start) const;

private:
    void *handle_ = nullptr;
};

class Graph {
public:
    // Takes what Stream::end_capture returned.
    explicit Graph(void *captured);
    ~Graph();
    Graph(const Graph &) = delete;
    Graph &operator=(const Graph &) = delete;

    void launch(const Stream &stream) const;

private:
    void *captured_;
    void *ready_ = nullptr;
};

// Device memory that grows and never shrinks.
class Buffer {
public:
    Buffer() = default;
    ~Buffer();
    Buffer(const Buffer &) = delete;
    Buffer &operator=(const Buffer &) = delete;

    // Room for so many bytes, at least one; what was in it may be lost.
    void reserve(std::uint64_t bytes);
    void upload(const void *values, std::uint64_t bytes, const Stream &stream) const;
    void download(void *values, std::uint64_t bytes, const Stream &stream) const;
    void fill(unsigned char value, std::uint64_t bytes, const Stream &stream) const;
    void *address() const { return reinterpret_cast<void *>(address_); }

private:
    std::uint64_t address_ = 0;
    std::uint64_t bytes_ = 0;
};

}  // namespace moa::engine

// libnvonnxparser without TensorRT.

#include <fstream>
#include <sstream>

#include "network.h"

// As the headers declare what the library exports.
#if NV_TENSORRT_MAJOR >= 11
#define MOA_PARSER_NOEXCEPT noexcept
#else
#define MOA_PARSER_NOEXCEPT
#endif

namespace fake {

namespace {

using nvonnxparser::ErrorCode;
using nvonnxparser::IParser;
using nvonnxparser::IParserError;

class ParserError final : public IParserError {
public:
    explicit ParserError(Problem problem) : problem_(std::move(problem)) {}
    ErrorCode code() const noexcept(noexcept(std::declval<const IParserError &>().code())) override { return problem_.code; }
    const char *desc() const noexcept(noexcept(std::declval<const IParserError &>().desc())) override { return problem_.text.c_str(); }
    const char *file() const noexcept(noexcept(std::declval<const IParserError &>().file())) override { return "fake/parser.cpp"; }
    int line() const noexcept(noexcept(std::declval<const IParserError &>().line())) override { return 7; }
    const char *func() const noexcept(noexcept(std::declval<const IParserError &>().func())) override { return "parse"; }
    int node() const noexcept(noexcept(std::declval<const IParserError &>().node())) override { return problem_.node; }
#if NV_TENSORRT_MAJOR >= 10
    const char *nodeName() const noexcept(noexcept(std::declval<const IParserError &>().nodeName())) override { return problem_.name.c_str(); }
    const char *nodeOperator() const noexcept(noexcept(std::declval<const IParserError &>().nodeOperator())) override { return problem_.op.c_str(); }
    const char *const *localFunctionStack() const noexcept(noexcept(std::declval<const IParserError &>().localFunctionStack())) override { return nullptr; }
    std::int32_t localFunctionStackSize() const noexcept(noexcept(std::declval<const IParserError &>().localFunctionStackSize())) override { return 0; }
#endif

private:
    Problem problem_;
};

struct Parser {
    Network *network;
    std::deque<ParserError> errors;

    bool parse(const std::string &bytes, const char *path) {
        const std::string place = path == nullptr ? "" : path;
        const auto slash = place.rfind('/');
        for (Problem &problem : network->fill(bytes, slash == std::string::npos ? "." : place.substr(0, slash))) {
            errors.emplace_back(std::move(problem));
        }
        return errors.empty();
    }
};

using ParserTable = Table<IParser, Parser>;
using ParserFace = Face<IParser, Parser>;

void end(ParserFace *face) {
    delete face->owner;
    delete face;
}

const ParserTable &parser_table() {
    static const ParserTable table = [] {
        ParserTable made;
        made.on(&IParser::parse, [](ParserFace *face, const void *bytes, std::size_t count, const char *path) {
                return face->owner->parse(std::string(static_cast<const char *>(bytes), count), path);
            })
            .on(&IParser::parseFromFile, [](ParserFace *face, const char *path, int) {
                std::ifstream file(path, std::ios::binary);
                std::ostringstream bytes;
                bytes << file.rdbuf();
                if (file) return face->owner->parse(bytes.str(), path);
                face->owner->errors.emplace_back(Problem{ErrorCode::kMODEL_DESERIALIZE_FAILED, -1, "", "", std::string("Failed to open file: ") + path});
                return false;
            })
            .on(&IParser::getNbErrors, [](ParserFace *face) { return static_cast<int>(face->owner->errors.size()); })
            .on(&IParser::getError, [](ParserFace *face, int index) -> const IParserError * {
                return &face->owner->errors.at(static_cast<std::size_t>(index));
            });
#if NV_TENSORRT_MAJOR >= 10
        made.on_delete_behind(&IParser::clearErrors, end);
#else
        made.on(&IParser::destroy, end);
#endif
        return made;
    }();
    return table;
}

}  // namespace

}  // namespace fake

extern "C" void *createNvOnnxParser_INTERNAL(void *network, void *, int) MOA_PARSER_NOEXCEPT {
    if (fake::is_told("no_parser")) return nullptr;
    auto *const owner = new fake::Parser{static_cast<fake::Network *>(static_cast<nvinfer1::INetworkDefinition *>(network)), {}};
    return new fake::ParserFace(fake::parser_table().face(owner));
}

extern "C" int getNvOnnxParserVersion() MOA_PARSER_NOEXCEPT { return NV_ONNX_PARSER_VERSION; }

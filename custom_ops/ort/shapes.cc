#include "ort/shapes.h"

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ort/glue.h"

namespace graphrot::ort {
namespace {

// A shape with names for what is not known. Without one, the runtime would write an unknown dimension as the
// number -1; a fresh name claims nothing.
struct Shape {
  std::vector<std::int64_t> sizes;
  std::vector<std::string> names;

  void write_names(const Api& api, TensorInfo* info) {
    static std::atomic<unsigned> unknown{0};
    std::vector<const char*> pointers(sizes.size());
    for (std::size_t axis = 0; axis < sizes.size(); ++axis) {
      if (sizes[axis] < 0 && names[axis].empty()) names[axis] = "graphrot_unknown_" + std::to_string(unknown++);
      pointers[axis] = names[axis].c_str();
    }
    check(api, api.call<slot::SetSymbolicDimensions>(info, pointers.data(), pointers.size()));
  }
};

// An input's type and shape, which stay the context's. False when not even the rank is known: a scalar is no input of
// these operators.
bool read_input(const Api& api, const ShapeInferContext* context, std::size_t index, TensorInfo** info, Shape* shape) {
  check(api, api.call<slot::ShapeInferContext_GetInputTypeShape>(context, index, info));
  const TensorInfo* seen = *info;
  std::size_t rank = 0;
  check(api, api.call<slot::GetDimensionsCount>(seen, &rank));
  if (rank == 0) return false;
  shape->sizes.resize(rank);
  std::vector<const char*> names(rank);
  check(api, api.call<slot::GetDimensions>(seen, shape->sizes.data(), rank));
  check(api, api.call<slot::GetSymbolicDimensions>(seen, names.data(), rank));
  for (const char* name : names) shape->names.emplace_back(name != nullptr ? name : "");
  return true;
}

void write_output(const Api& api, const ShapeInferContext* context, std::size_t index, const TensorInfo* info) {
  check(api, api.call<slot::ShapeInferContext_SetOutputTypeShape>(context, index, info));
}

// The shape, with the type of `like`.
void write_made(const Api& api, const ShapeInferContext* context, std::size_t index, const TensorInfo* like,
                Shape* shape) {
  ElementType type = kUndefined;
  check(api, api.call<slot::GetTensorElementType>(like, &type));
  TensorInfo* raw = nullptr;
  check(api, api.call<slot::CreateTensorTypeAndShapeInfo>(&raw));
  const std::unique_ptr<TensorInfo, InfoRelease> made(raw, InfoRelease{api});
  check(api, api.call<slot::SetTensorElementType>(raw, type));
  check(api,
        api.call<slot::SetDimensions>(raw, static_cast<const std::int64_t*>(shape->sizes.data()), shape->sizes.size()));
  shape->write_names(api, raw);
  write_output(api, context, index, raw);
}

}  // namespace

void pass_shape_on(const Api& api, ShapeInferContext* context) {
  TensorInfo* info = nullptr;
  Shape shape;
  if (!read_input(api, context, 0, &info, &shape)) return;
  shape.write_names(api, info);
  write_output(api, context, 0, info);
}

void pass_shape_on_with_last(const Api& api, ShapeInferContext* context, const char* name) {
  TensorInfo* info = nullptr;
  Shape shape;
  if (!read_input(api, context, 0, &info, &shape)) return;
  const ShapeInferContext* seen = context;
  const OpAttribute* attribute = nullptr;
  check(api, api.call<slot::ShapeInferContext_GetAttribute>(seen, name, &attribute));
  std::int64_t last = 0;
  std::size_t bytes = 0;
  check(api, api.call<slot::ReadOpAttr>(attribute, kAttributeInt, static_cast<void*>(&last), sizeof last, &bytes));
  shape.sizes.back() = last;
  shape.names.back().clear();
  write_made(api, seen, 0, info, &shape);
}

void pass_shape_on_but(const Api& api, ShapeInferContext* context, std::size_t input, std::size_t output,
                       std::size_t axis) {
  TensorInfo* info = nullptr;
  Shape shape;
  if (!read_input(api, context, input, &info, &shape) || axis >= shape.sizes.size()) return;
  shape.sizes[axis] = -1;
  shape.names[axis].clear();
  write_made(api, context, output, info, &shape);
}

}  // namespace graphrot::ort

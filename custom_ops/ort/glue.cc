#include "ort/glue.h"

#include <memory>

namespace graphrot::ort {
namespace {

[[noreturn]] void missing(const char* name, const char* kind, const std::string& reason) {
  throw std::invalid_argument("attribute '" + std::string(name) + "' (" + kind + ") is missing or of another type: " + reason);
}

// Calls into the runtime for an attribute; a failure names the attribute.
template <class Call>
void read_attribute(const Api& api, const char* name, const char* kind, Call&& call) {
  try {
    check(api, call());
  } catch (const RuntimeFailure& error) {
    missing(name, kind, error.what());
  }
}

// A name that is asked for twice: for its size, which counts the closing NUL, and for itself.
template <class Call>
std::string name_of(const Api& api, Call&& call) {
  std::size_t size = 0;
  char* const none = nullptr;
  check(api, call(none, &size));
  std::string name(size, '\0');
  check(api, call(name.data(), &size));
  name.resize(size != 0 ? size - 1 : 0);
  return name;
}

struct ValueRelease {
  Api api;
  void operator()(Value* value) const { api.call<slot::ReleaseValue>(value); }
};

}  // namespace

void check(const Api& api, Status* status) {
  if (status == nullptr) return;
  const ErrorCode code = api.call<slot::GetErrorCode>(static_cast<const Status*>(status));
  std::string message;
  try {
    message = api.call<slot::GetErrorMessage>(static_cast<const Status*>(status));
  } catch (...) {
    api.call<slot::ReleaseStatus>(status);
    throw;
  }
  api.call<slot::ReleaseStatus>(status);
  throw RuntimeFailure(code, message);
}

std::int64_t attribute_int(const Api& api, const KernelInfo* info, const char* name) {
  std::int64_t value = 0;
  read_attribute(api, name, "int", [&] { return api.call<slot::KernelInfoGetAttribute_int64>(info, name, &value); });
  return value;
}

float attribute_float(const Api& api, const KernelInfo* info, const char* name) {
  float value = 0;
  read_attribute(api, name, "float", [&] { return api.call<slot::KernelInfoGetAttribute_float>(info, name, &value); });
  return value;
}

std::int64_t attribute_in_range(const Api& api, const KernelInfo* info, const char* name, std::int64_t least,
                                std::int64_t most) {
  const std::int64_t value = attribute_int(api, info, name);
  if (value >= least && value <= most) return value;
  throw std::invalid_argument("attribute '" + std::string(name) + "' is " + std::to_string(value) +
                              "; it must be from " + std::to_string(least) + " to " + std::to_string(most));
}

std::vector<std::int64_t> attribute_ints(const Api& api, const KernelInfo* info, const char* name) {
  std::size_t count = 0;
  std::int64_t* const none = nullptr;
  read_attribute(api, name, "ints",
                 [&] { return api.call<slot::KernelInfoGetAttributeArray_int64>(info, name, none, &count); });
  std::vector<std::int64_t> values(count);
  if (count != 0) {
    read_attribute(api, name, "ints", [&] {
      return api.call<slot::KernelInfoGetAttributeArray_int64>(info, name, values.data(), &count);
    });
  }
  return values;
}

TensorAttribute attribute_tensor(const Api& api, const KernelInfo* info, const char* name) {
  Allocator* allocator = nullptr;
  check(api, api.call<slot::GetAllocatorWithDefaultOptions>(&allocator));
  Value* raw = nullptr;
  read_attribute(api, name, "tensor",
                 [&] { return api.call<slot::KernelInfoGetAttribute_tensor>(info, name, allocator, &raw); });
  const std::unique_ptr<Value, ValueRelease> value(raw, ValueRelease{api});
  TensorAttribute result{};
  result.shape = shape_of(api, value.get(), &result.type);
  std::size_t count = 1;
  for (const std::int64_t extent : result.shape) count *= static_cast<std::size_t>(extent);
  result.values.resize(count);
  const void* data = data_of(api, value.get());
  if (result.type == kInt8) {
    const auto* from = static_cast<const std::int8_t*>(data);
    for (std::size_t i = 0; i < count; ++i) result.values[i] = from[i];
  } else if (result.type == kFloat32) {
    const auto* from = static_cast<const float*>(data);
    for (std::size_t i = 0; i < count; ++i) result.values[i] = from[i];
  } else {
    throw std::invalid_argument("attribute '" + std::string(name) + "' must hold int8 or float");
  }
  return result;
}

std::string node_name(const Api& api, const KernelInfo* info) {
  return name_of(api, [&](char* out, std::size_t* size) { return api.call<slot::KernelInfo_GetNodeName>(info, out, size); });
}

std::vector<std::int64_t> shape_of(const Api& api, const Value* value, ElementType* type) {
  TensorInfo* raw = nullptr;
  check(api, api.call<slot::GetTensorTypeAndShape>(value, &raw));
  const std::unique_ptr<TensorInfo, InfoRelease> info(raw, InfoRelease{api});
  const TensorInfo* seen = raw;
  if (type != nullptr) check(api, api.call<slot::GetTensorElementType>(seen, type));
  std::size_t rank = 0;
  check(api, api.call<slot::GetDimensionsCount>(seen, &rank));
  std::vector<std::int64_t> shape(rank);
  if (rank != 0) check(api, api.call<slot::GetDimensions>(seen, shape.data(), rank));
  return shape;
}

std::string words(const std::vector<std::int64_t>& shape) {
  std::string text = "[";
  for (const std::int64_t extent : shape) text += (text.size() > 1 ? ", " : "") + std::to_string(extent);
  return text + "]";
}

const Value* constant_input(const Api& api, const KernelInfo* info, std::size_t index, const char* name) {
  int constant = 0;
  const Value* value = nullptr;
  check(api, api.call<slot::KernelInfoGetConstantInput_tensor>(info, index, &constant, &value));
  if (constant == 0 || value == nullptr) {
    throw std::invalid_argument("input '" + std::string(name) + "' must be an initializer of the model");
  }
  return value;
}

bool has_input(const Api& api, const KernelInfo* info, std::size_t index) {
  std::size_t count = 0;
  check(api, api.call<slot::KernelInfo_GetInputCount>(info, &count));
  if (index >= count) return false;
  return !name_of(api, [&](char* out, std::size_t* size) { return api.call<slot::KernelInfo_GetInputName>(info, index, out, size); })
              .empty();
}

const void* data_of(const Api& api, const Value* value) {
  return mutable_data_of(api, const_cast<Value*>(value));  // the only reader that every version has
}

void* mutable_data_of(const Api& api, Value* value) {
  void* data = nullptr;
  check(api, api.call<slot::GetTensorMutableData>(value, &data));
  return data;
}

}  // namespace graphrot::ort

// Compares abi.h with the official header. Built only with -DGRAPHROT_ORT_INCLUDE=<dir>; holds no code.
#include <onnxruntime_c_api.h>

#include <cstddef>

#include "ort/abi.h"

namespace {

#define GRAPHROT_CHECK_SLOT(name, position, result, parameters) \
  static_assert(offsetof(OrtApi, name) == (position) * sizeof(void*), "index of " #name);
GRAPHROT_ORT_SLOTS(GRAPHROT_CHECK_SLOT)
#undef GRAPHROT_CHECK_SLOT

#define GRAPHROT_CHECK_FIELD(name) \
  static_assert(offsetof(OrtCustomOp, name) == offsetof(graphrot::ort::CustomOp, name), "offset of " #name);
GRAPHROT_CHECK_FIELD(version)
GRAPHROT_CHECK_FIELD(CreateKernel)
GRAPHROT_CHECK_FIELD(GetName)
GRAPHROT_CHECK_FIELD(GetExecutionProviderType)
GRAPHROT_CHECK_FIELD(GetInputType)
GRAPHROT_CHECK_FIELD(GetInputTypeCount)
GRAPHROT_CHECK_FIELD(GetOutputType)
GRAPHROT_CHECK_FIELD(GetOutputTypeCount)
GRAPHROT_CHECK_FIELD(KernelCompute)
GRAPHROT_CHECK_FIELD(KernelDestroy)
GRAPHROT_CHECK_FIELD(GetInputCharacteristic)
GRAPHROT_CHECK_FIELD(GetOutputCharacteristic)
GRAPHROT_CHECK_FIELD(GetInputMemoryType)
GRAPHROT_CHECK_FIELD(GetVariadicInputMinArity)
GRAPHROT_CHECK_FIELD(GetVariadicInputHomogeneity)
GRAPHROT_CHECK_FIELD(GetVariadicOutputMinArity)
GRAPHROT_CHECK_FIELD(GetVariadicOutputHomogeneity)
GRAPHROT_CHECK_FIELD(CreateKernelV2)
GRAPHROT_CHECK_FIELD(KernelComputeV2)
GRAPHROT_CHECK_FIELD(InferOutputShapeFn)
GRAPHROT_CHECK_FIELD(GetStartVersion)
GRAPHROT_CHECK_FIELD(GetEndVersion)
GRAPHROT_CHECK_FIELD(GetMayInplace)
GRAPHROT_CHECK_FIELD(ReleaseMayInplace)
GRAPHROT_CHECK_FIELD(GetAliasMap)
GRAPHROT_CHECK_FIELD(ReleaseAliasMap)
#undef GRAPHROT_CHECK_FIELD

static_assert(offsetof(OrtApiBase, GetApi) == offsetof(graphrot::ort::ApiBase, GetApi), "OrtApiBase");
static_assert(static_cast<int>(ORT_FAIL) == graphrot::ort::kFail, "error codes");
static_assert(static_cast<int>(ORT_INVALID_ARGUMENT) == graphrot::ort::kInvalidArgument, "error codes");
static_assert(static_cast<int>(ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT) == graphrot::ort::kFloat32, "element types");
static_assert(static_cast<int>(ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8) == graphrot::ort::kUint8, "element types");
static_assert(static_cast<int>(ORT_OP_ATTR_INT) == graphrot::ort::kAttributeInt, "attribute types");
static_assert(static_cast<int>(ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8) == graphrot::ort::kInt8, "element types");
static_assert(static_cast<int>(ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32) == graphrot::ort::kInt32, "element types");
static_assert(static_cast<int>(ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16) == graphrot::ort::kFloat16, "element types");
static_assert(static_cast<int>(ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16) == graphrot::ort::kBFloat16, "element types");
static_assert(static_cast<int>(OrtMemTypeCPUInput) == graphrot::ort::kHostMemory, "memory types");
static_assert(static_cast<int>(OrtMemTypeDefault) == graphrot::ort::kDefaultMemory, "memory types");
static_assert(sizeof(OrtErrorCode) == sizeof(int) && sizeof(ONNXTensorElementDataType) == sizeof(int), "enums are ints");

}  // namespace

// The part of ONNX Runtime's C interface that this library uses, declared by hand.
//
// OrtApi is a flat, append-only table of function pointers, so a slot keeps its index and signature for
// ever. Version 18 of the table holds all that is named here. With -DGRAPHROT_ORT_INCLUDE=<dir>,
// abi_check.cc compares every index and offset with the official header.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(_WIN32)
#define GRAPHROT_ORT_CALL __stdcall
#else
#define GRAPHROT_ORT_CALL
#endif

namespace graphrot::ort {

inline constexpr std::uint32_t kApiVersion = 18;

// Opaque handles.
struct Status;
struct SessionOptions;
struct CustomOpDomain;
struct KernelInfo;
struct KernelContext;
struct ShapeInferContext;
struct Value;
struct TensorInfo;  // OrtTensorTypeAndShapeInfo
struct Allocator;
struct MemoryInfo;
struct CustomOp;
struct OpAttribute;  // OrtOpAttr

enum ErrorCode : int { kFail = 1, kInvalidArgument = 2 };

enum ElementType : int {
  kUndefined = 0,
  kFloat32 = 1,
  kUint8 = 2,
  kInt8 = 3,
  kInt32 = 6,
  kFloat16 = 10,
  kBFloat16 = 16,
};

enum AttributeType : int { kAttributeInt = 1 };

enum Characteristic : int { kRequired = 0, kOptional = 1, kVariadic = 2 };
enum MemoryType : int { kHostMemory = -2, kDefaultMemory = 0 };  // OrtMemTypeCPUInput, OrtMemTypeDefault

struct ApiBase {
  const void* const* (GRAPHROT_ORT_CALL* GetApi)(std::uint32_t version);
  const char* (GRAPHROT_ORT_CALL* GetVersionString)();
};

// name, index in OrtApi, result, parameters
#define GRAPHROT_ORT_SLOTS(SLOT)                                                                               \
  SLOT(CreateStatus, 0, Status*, (ErrorCode code, const char* message))                                        \
  SLOT(GetErrorCode, 1, ErrorCode, (const Status* status))                                                     \
  SLOT(GetErrorMessage, 2, const char*, (const Status* status))                                                \
  SLOT(CreateCustomOpDomain, 26, Status*, (const char* domain, CustomOpDomain** out))                          \
  SLOT(CustomOpDomain_Add, 27, Status*, (CustomOpDomain * domain, const CustomOp* op))                         \
  SLOT(AddCustomOpDomain, 28, Status*, (SessionOptions * options, CustomOpDomain* domain))                     \
  SLOT(GetTensorMutableData, 51, Status*, (Value * value, void** out))                                         \
  SLOT(CreateTensorTypeAndShapeInfo, 57, Status*, (TensorInfo * *out))                                         \
  SLOT(SetTensorElementType, 58, Status*, (TensorInfo * info, ElementType type))                               \
  SLOT(SetDimensions, 59, Status*, (TensorInfo * info, const std::int64_t* values, std::size_t count))         \
  SLOT(GetTensorElementType, 60, Status*, (const TensorInfo* info, ElementType* out))                          \
  SLOT(GetDimensionsCount, 61, Status*, (const TensorInfo* info, std::size_t* out))                            \
  SLOT(GetDimensions, 62, Status*, (const TensorInfo* info, std::int64_t* values, std::size_t count))          \
  SLOT(GetSymbolicDimensions, 63, Status*,                                                                     \
       (const TensorInfo* info, const char** names, std::size_t count))                                        \
  SLOT(GetTensorTypeAndShape, 65, Status*, (const Value* value, TensorInfo** out))                             \
  SLOT(AllocatorAlloc, 75, Status*, (Allocator * allocator, std::size_t bytes, void** out))                    \
  SLOT(AllocatorFree, 76, Status*, (Allocator * allocator, void* memory))                                      \
  SLOT(AllocatorGetInfo, 77, Status*, (const Allocator* allocator, const MemoryInfo** out))                    \
  SLOT(GetAllocatorWithDefaultOptions, 78, Status*, (Allocator * *out))                                        \
  SLOT(KernelInfoGetAttribute_float, 85, Status*, (const KernelInfo* info, const char* name, float* out))      \
  SLOT(KernelInfoGetAttribute_int64, 86, Status*,                                                              \
       (const KernelInfo* info, const char* name, std::int64_t* out))                                          \
  SLOT(KernelContext_GetInput, 90, Status*,                                                                    \
       (const KernelContext* context, std::size_t index, const Value** out))                                   \
  SLOT(KernelContext_GetOutput, 91, Status*,                                                                   \
       (KernelContext * context, std::size_t index, const std::int64_t* dims, std::size_t count, Value** out)) \
  SLOT(ReleaseStatus, 93, void, (Status * status))                                                             \
  SLOT(ReleaseValue, 96, void, (Value * value))                                                                \
  SLOT(ReleaseTensorTypeAndShapeInfo, 99, void, (TensorInfo * info))                                           \
  SLOT(ReleaseAllocator, 132, void, (Allocator * allocator))                                                   \
  SLOT(KernelInfoGetAttributeArray_int64, 163, Status*,                                                        \
       (const KernelInfo* info, const char* name, std::int64_t* out, std::size_t* count))                      \
  SLOT(KernelContext_GetGPUComputeStream, 193, Status*, (const KernelContext* context, void** out))            \
  SLOT(KernelInfo_GetInputCount, 230, Status*, (const KernelInfo* info, std::size_t* out))                     \
  SLOT(KernelInfo_GetInputName, 232, Status*,                                                                  \
       (const KernelInfo* info, std::size_t index, char* out, std::size_t* size))                              \
  SLOT(KernelInfoGetAttribute_tensor, 236, Status*,                                                            \
       (const KernelInfo* info, const char* name, Allocator* allocator, Value** out))                          \
  SLOT(KernelInfo_GetNodeName, 244, Status*, (const KernelInfo* info, char* out, std::size_t* size))           \
  SLOT(KernelInfoGetConstantInput_tensor, 249, Status*,                                                        \
       (const KernelInfo* info, std::size_t index, int* constant, const Value** out))                          \
  SLOT(ShapeInferContext_GetInputTypeShape, 268, Status*,                                                      \
       (const ShapeInferContext* context, std::size_t index, TensorInfo** out))                                \
  SLOT(ShapeInferContext_GetAttribute, 269, Status*,                                                           \
       (const ShapeInferContext* context, const char* name, const OpAttribute** out))                          \
  SLOT(ShapeInferContext_SetOutputTypeShape, 270, Status*,                                                     \
       (const ShapeInferContext* context, std::size_t index, const TensorInfo* info))                          \
  SLOT(SetSymbolicDimensions, 271, Status*, (TensorInfo * info, const char** names, std::size_t count))        \
  SLOT(ReadOpAttr, 272, Status*,                                                                               \
       (const OpAttribute* attribute, AttributeType type, void* data, std::size_t bytes, std::size_t* out))    \
  SLOT(KernelContext_ParallelFor, 274, Status*,                                                                \
       (const KernelContext* context, void (*function)(void*, std::size_t), std::size_t total,                 \
        std::size_t batches, void* user))                                                                       \
  SLOT(KernelContext_GetScratchBuffer, 277, Status*,                                                           \
       (const KernelContext* context, const MemoryInfo* memory, std::size_t bytes, void** out))                \
  SLOT(KernelInfoGetAllocator, 278, Status*, (const KernelInfo* info, MemoryType type, Allocator** out))

// One type per slot, so that a call reads api.call<slot::ReleaseValue>(value).
namespace slot {
#define GRAPHROT_ORT_DECLARE(name, position, result, parameters) \
  struct name {                                                  \
    static constexpr std::size_t kIndex = position;              \
    using Function = result(GRAPHROT_ORT_CALL*) parameters;      \
  };
GRAPHROT_ORT_SLOTS(GRAPHROT_ORT_DECLARE)
#undef GRAPHROT_ORT_DECLARE
}  // namespace slot

class Api {
 public:
  explicit Api(const void* const* table) : table_(table) {}

  template <class Slot, class... Arguments>
  auto call(Arguments... arguments) const {
    return reinterpret_cast<typename Slot::Function>(const_cast<void*>(table_[Slot::kIndex]))(arguments...);
  }

 private:
  const void* const* table_;
};

// OrtCustomOp. The runtime reads a field only where `version` is at least the one that brought it.
struct CustomOp {
  std::uint32_t version;
  void*(GRAPHROT_ORT_CALL* CreateKernel)(const CustomOp*, const void* const*, const KernelInfo*);
  const char*(GRAPHROT_ORT_CALL* GetName)(const CustomOp*);
  const char*(GRAPHROT_ORT_CALL* GetExecutionProviderType)(const CustomOp*);
  ElementType(GRAPHROT_ORT_CALL* GetInputType)(const CustomOp*, std::size_t);
  std::size_t(GRAPHROT_ORT_CALL* GetInputTypeCount)(const CustomOp*);
  ElementType(GRAPHROT_ORT_CALL* GetOutputType)(const CustomOp*, std::size_t);
  std::size_t(GRAPHROT_ORT_CALL* GetOutputTypeCount)(const CustomOp*);
  void(GRAPHROT_ORT_CALL* KernelCompute)(void*, KernelContext*);
  void(GRAPHROT_ORT_CALL* KernelDestroy)(void*);
  Characteristic(GRAPHROT_ORT_CALL* GetInputCharacteristic)(const CustomOp*, std::size_t);
  Characteristic(GRAPHROT_ORT_CALL* GetOutputCharacteristic)(const CustomOp*, std::size_t);
  MemoryType(GRAPHROT_ORT_CALL* GetInputMemoryType)(const CustomOp*, std::size_t);
  int(GRAPHROT_ORT_CALL* GetVariadicInputMinArity)(const CustomOp*);
  int(GRAPHROT_ORT_CALL* GetVariadicInputHomogeneity)(const CustomOp*);
  int(GRAPHROT_ORT_CALL* GetVariadicOutputMinArity)(const CustomOp*);
  int(GRAPHROT_ORT_CALL* GetVariadicOutputHomogeneity)(const CustomOp*);
  Status*(GRAPHROT_ORT_CALL* CreateKernelV2)(const CustomOp*, const void* const*, const KernelInfo*, void**);
  Status*(GRAPHROT_ORT_CALL* KernelComputeV2)(void*, KernelContext*);
  Status*(GRAPHROT_ORT_CALL* InferOutputShapeFn)(const CustomOp*, ShapeInferContext*);
  int(GRAPHROT_ORT_CALL* GetStartVersion)(const CustomOp*);
  int(GRAPHROT_ORT_CALL* GetEndVersion)(const CustomOp*);
  std::size_t(GRAPHROT_ORT_CALL* GetMayInplace)(int**, int**);
  void(GRAPHROT_ORT_CALL* ReleaseMayInplace)(int*, int*);
  std::size_t(GRAPHROT_ORT_CALL* GetAliasMap)(int**, int**);
  void(GRAPHROT_ORT_CALL* ReleaseAliasMap)(int*, int*);
};

static_assert(sizeof(void*) != 8 || sizeof(CustomOp) == 208, "layout of OrtCustomOp");

}  // namespace graphrot::ort

// The part of <onnxruntime_c_api.h> that this sample uses, under the same names, for machines without the official
// header (the Python wheel brings the runtime, and no header). OrtApi is append-only: a slot keeps its place and its
// signature for ever, so that this table of version 18 fits every later runtime.
#pragma once

#include <stddef.h>
#include <stdint.h>

#define ORT_API_VERSION 18

#if defined(_WIN32)
#define ORT_API_CALL __stdcall
#define ORTCHAR_T wchar_t
#else
#define ORT_API_CALL
#define ORTCHAR_T char
#endif

typedef struct OrtAllocator OrtAllocator;
typedef struct OrtCUDAProviderOptionsV2 OrtCUDAProviderOptionsV2;
typedef struct OrtEnv OrtEnv;
typedef struct OrtIoBinding OrtIoBinding;
typedef struct OrtMemoryInfo OrtMemoryInfo;
typedef struct OrtRunOptions OrtRunOptions;
typedef struct OrtSession OrtSession;
typedef struct OrtSessionOptions OrtSessionOptions;
typedef struct OrtStatus OrtStatus;
typedef struct OrtTensorTypeAndShapeInfo OrtTensorTypeAndShapeInfo;
typedef struct OrtTypeInfo OrtTypeInfo;
typedef struct OrtValue OrtValue;

typedef enum OrtLoggingLevel { ORT_LOGGING_LEVEL_WARNING = 2 } OrtLoggingLevel;

typedef enum OrtAllocatorType { OrtDeviceAllocator = 0 } OrtAllocatorType;
typedef enum OrtMemType { OrtMemTypeDefault = 0 } OrtMemType;

typedef enum ONNXTensorElementDataType {
  ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT = 1,
  ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32 = 6,
  ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64 = 7,
  ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16 = 10,
} ONNXTensorElementDataType;

// Slots by their place in the official table; what lies between is not used here.
typedef struct OrtApi {
  void* slot_0[2];
  const char*(ORT_API_CALL* GetErrorMessage)(const OrtStatus* status);  // 2
  OrtStatus*(ORT_API_CALL* CreateEnv)(OrtLoggingLevel level, const char* id, OrtEnv** out);
  void* slot_4[3];
  OrtStatus*(ORT_API_CALL* CreateSession)(const OrtEnv* env, const ORTCHAR_T* path, const OrtSessionOptions* options,
                                          OrtSession** out);  // 7
  void* slot_8[2];
  OrtStatus*(ORT_API_CALL* CreateSessionOptions)(OrtSessionOptions** out);  // 10
  void* slot_11[13];
  OrtStatus*(ORT_API_CALL* SetIntraOpNumThreads)(OrtSessionOptions* options, int threads);  // 24
  void* slot_25[4];
  OrtStatus*(ORT_API_CALL* RegisterCustomOpsLibrary)(OrtSessionOptions* options, const char* path,
                                                     void** handle);                          // 29
  OrtStatus*(ORT_API_CALL* SessionGetInputCount)(const OrtSession* session, size_t* out);     // 30
  void* slot_31[2];
  OrtStatus*(ORT_API_CALL* SessionGetInputTypeInfo)(const OrtSession* session, size_t index, OrtTypeInfo** out);  // 33
  void* slot_34[2];
  OrtStatus*(ORT_API_CALL* SessionGetInputName)(const OrtSession* session, size_t index, OrtAllocator* allocator,
                                                char** out);  // 36
  void* slot_37[11];
  OrtStatus*(ORT_API_CALL* CreateTensorAsOrtValue)(OrtAllocator* allocator, const int64_t* shape, size_t rank,
                                                   ONNXTensorElementDataType type, OrtValue** out);  // 48
  void* slot_49[2];
  OrtStatus*(ORT_API_CALL* GetTensorMutableData)(OrtValue* value, void** out);  // 51
  void* slot_52[3];
  OrtStatus*(ORT_API_CALL* CastTypeInfoToTensorInfo)(const OrtTypeInfo* info,
                                                     const OrtTensorTypeAndShapeInfo** out);  // 55
  void* slot_56[4];
  OrtStatus*(ORT_API_CALL* GetTensorElementType)(const OrtTensorTypeAndShapeInfo* info,
                                                 ONNXTensorElementDataType* out);                       // 60
  OrtStatus*(ORT_API_CALL* GetDimensionsCount)(const OrtTensorTypeAndShapeInfo* info, size_t* out);     // 61
  OrtStatus*(ORT_API_CALL* GetDimensions)(const OrtTensorTypeAndShapeInfo* info, int64_t* values, size_t count);  // 62
  void* slot_63[2];
  OrtStatus*(ORT_API_CALL* GetTensorTypeAndShape)(const OrtValue* value, OrtTensorTypeAndShapeInfo** out);  // 65
  void* slot_66[2];
  OrtStatus*(ORT_API_CALL* CreateMemoryInfo)(const char* name, OrtAllocatorType type, int id, OrtMemType memory_type,
                                             OrtMemoryInfo** out);  // 68
  void* slot_69[7];
  OrtStatus*(ORT_API_CALL* AllocatorFree)(OrtAllocator* allocator, void* memory);  // 76
  void* slot_77[1];
  OrtStatus*(ORT_API_CALL* GetAllocatorWithDefaultOptions)(OrtAllocator** out);  // 78
  void* slot_79[13];
  void(ORT_API_CALL* ReleaseEnv)(OrtEnv* env);           // 92
  void(ORT_API_CALL* ReleaseStatus)(OrtStatus* status);  // 93
  void(ORT_API_CALL* ReleaseMemoryInfo)(OrtMemoryInfo* info);  // 94
  void(ORT_API_CALL* ReleaseSession)(OrtSession* session);  // 95
  void(ORT_API_CALL* ReleaseValue)(OrtValue* value);        // 96
  void* slot_97[1];
  void(ORT_API_CALL* ReleaseTypeInfo)(OrtTypeInfo* info);                              // 98
  void(ORT_API_CALL* ReleaseTensorTypeAndShapeInfo)(OrtTensorTypeAndShapeInfo* info);  // 99
  void(ORT_API_CALL* ReleaseSessionOptions)(OrtSessionOptions* options);               // 100
  void* slot_101[29];
  OrtStatus*(ORT_API_CALL* AddSessionConfigEntry)(OrtSessionOptions* options, const char* key, const char* value);  // 130
  void* slot_131[2];
  OrtStatus*(ORT_API_CALL* RunWithBinding)(OrtSession* session, const OrtRunOptions* options,
                                           const OrtIoBinding* binding);               // 133
  OrtStatus*(ORT_API_CALL* CreateIoBinding)(OrtSession* session, OrtIoBinding** out);  // 134
  void(ORT_API_CALL* ReleaseIoBinding)(OrtIoBinding* binding);                         // 135
  OrtStatus*(ORT_API_CALL* BindInput)(OrtIoBinding* binding, const char* name, const OrtValue* value);  // 136
  void* slot_137[1];
  OrtStatus*(ORT_API_CALL* BindOutputToDevice)(OrtIoBinding* binding, const char* name,
                                               const OrtMemoryInfo* info);  // 138
  void* slot_139[1];
  OrtStatus*(ORT_API_CALL* GetBoundOutputValues)(const OrtIoBinding* binding, OrtAllocator* allocator,
                                                 OrtValue*** values, size_t* count);  // 140
  void* slot_141[63];
  OrtStatus*(ORT_API_CALL* SessionOptionsAppendExecutionProvider_CUDA_V2)(
      OrtSessionOptions* options, const OrtCUDAProviderOptionsV2* cuda_options);               // 204
  OrtStatus*(ORT_API_CALL* CreateCUDAProviderOptions)(OrtCUDAProviderOptionsV2** out);          // 205
  OrtStatus*(ORT_API_CALL* UpdateCUDAProviderOptions)(OrtCUDAProviderOptionsV2* options, const char* const* keys,
                                                      const char* const* values, size_t count);  // 206
  void* slot_207[1];
  void(ORT_API_CALL* ReleaseCUDAProviderOptions)(OrtCUDAProviderOptionsV2* options);  // 208
} OrtApi;

typedef struct OrtApiBase {
  const OrtApi*(ORT_API_CALL* GetApi)(uint32_t version);
  const char*(ORT_API_CALL* GetVersionString)(void);
} OrtApiBase;

static_assert(offsetof(OrtApi, CreateSessionOptions) == 10 * sizeof(void*), "place of CreateSessionOptions");
static_assert(offsetof(OrtApi, RegisterCustomOpsLibrary) == 29 * sizeof(void*), "place of RegisterCustomOpsLibrary");
static_assert(offsetof(OrtApi, GetTensorTypeAndShape) == 65 * sizeof(void*), "place of GetTensorTypeAndShape");
static_assert(offsetof(OrtApi, CreateMemoryInfo) == 68 * sizeof(void*), "place of CreateMemoryInfo");
static_assert(offsetof(OrtApi, AddSessionConfigEntry) == 130 * sizeof(void*), "place of AddSessionConfigEntry");
static_assert(offsetof(OrtApi, GetBoundOutputValues) == 140 * sizeof(void*), "place of GetBoundOutputValues");
static_assert(offsetof(OrtApi, ReleaseCUDAProviderOptions) == 208 * sizeof(void*), "place of ReleaseCUDAProviderOptions");

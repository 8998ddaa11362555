// Greedy generation with a model that graphrot wrote, through ONNX Runtime's C interface: token ids in, token ids out.
//
//   generate RUNTIME MODEL [--library PATH] [--cuda GPU] [--count N] [--config KEY=VALUE] TOKEN...
//
// RUNTIME is libonnxruntime.so, for example the one in a Python wheel (onnxruntime/capi/). PATH is what
// graphrot.library_path() prints; without it the functions inside the model run. --cuda 0 runs on the first GPU: then
// the cache stays in its memory from step to step, and only token ids and logits travel.
#if __has_include(<onnxruntime_c_api.h>)
#include <onnxruntime_c_api.h>
#else
#include "onnxruntime_subset.h"
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#if defined(_WIN32)
#include <windows.h>
#else
#include <dlfcn.h>
#endif

namespace {

const OrtApi* ort = nullptr;

void check(OrtStatus* status) {
  if (status == nullptr) return;
  const std::string message = ort->GetErrorMessage(status);
  ort->ReleaseStatus(status);
  throw std::runtime_error(message);
}

// The runtime's objects, each released by its own function.
template <auto Release>
struct Releaser {
  template <class T>
  void operator()(T* object) const {
    (ort->*Release)(object);
  }
};
using Env = std::unique_ptr<OrtEnv, Releaser<&OrtApi::ReleaseEnv>>;
using Options = std::unique_ptr<OrtSessionOptions, Releaser<&OrtApi::ReleaseSessionOptions>>;
using Session = std::unique_ptr<OrtSession, Releaser<&OrtApi::ReleaseSession>>;
using Binding = std::unique_ptr<OrtIoBinding, Releaser<&OrtApi::ReleaseIoBinding>>;
using Memory = std::unique_ptr<OrtMemoryInfo, Releaser<&OrtApi::ReleaseMemoryInfo>>;
using CudaOptions = std::unique_ptr<OrtCUDAProviderOptionsV2, Releaser<&OrtApi::ReleaseCUDAProviderOptions>>;
using Value = std::unique_ptr<OrtValue, Releaser<&OrtApi::ReleaseValue>>;
using TypeInfo = std::unique_ptr<OrtTypeInfo, Releaser<&OrtApi::ReleaseTypeInfo>>;
using ShapeInfo = std::unique_ptr<OrtTensorTypeAndShapeInfo, Releaser<&OrtApi::ReleaseTensorTypeAndShapeInfo>>;

// Calls a function whose last argument takes the result.
template <class Owner, class Function, class... Arguments>
Owner make(Function function, Arguments... arguments) {
  typename Owner::pointer object = nullptr;
  check(function(arguments..., &object));
  return Owner(object);
}

struct Tensor {
  ONNXTensorElementDataType type{};
  std::vector<std::int64_t> shape;
};

Tensor tensor_of(const OrtTensorTypeAndShapeInfo* info) {
  Tensor tensor;
  check(ort->GetTensorElementType(info, &tensor.type));
  std::size_t rank = 0;
  check(ort->GetDimensionsCount(info, &rank));
  tensor.shape.resize(rank);
  check(ort->GetDimensions(info, tensor.shape.data(), rank));
  return tensor;
}

const OrtApiBase* load_runtime(const char* path) {
#if defined(_WIN32)
  HMODULE library = LoadLibraryA(path);
  void* symbol = library == nullptr ? nullptr : reinterpret_cast<void*>(GetProcAddress(library, "OrtGetApiBase"));
  const std::string reason = "error " + std::to_string(GetLastError());
#else
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  void* symbol = library == nullptr ? nullptr : dlsym(library, "OrtGetApiBase");
  const char* message = symbol == nullptr ? dlerror() : nullptr;
  const std::string reason = message == nullptr ? "" : message;
#endif
  if (symbol == nullptr) throw std::runtime_error("no ONNX Runtime in " + std::string(path) + ": " + reason);
  return reinterpret_cast<const OrtApiBase*(ORT_API_CALL*)()>(symbol)();
}

float half_to_float(std::uint16_t bits) {
  const int exponent = (bits >> 10) & 31, fraction = bits & 1023;
  const float value = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24)
                      : exponent == 31 ? (fraction != 0 ? NAN : INFINITY)
                                       : std::ldexp(static_cast<float>(1024 + fraction), exponent - 25);
  return (bits & 0x8000) != 0 ? -value : value;
}

Memory memory_of(const char* device, int number) {
  return make<Memory>(ort->CreateMemoryInfo, device, OrtDeviceAllocator, number, OrtMemTypeDefault);
}

// A decoder with the usual names: input_ids, attention_mask, position_ids, past_key_values.N.key/value in;
// logits, present.N.key/value out. The cache lives in `cache_memory`, where the session runs.
class Decoder {
 public:
  Decoder(const OrtEnv* env, const std::string& path, const OrtSessionOptions* options, Memory cache_memory)
      : cache_memory_(std::move(cache_memory)),
        session_(make<Session>(ort->CreateSession, env, std::basic_string<ORTCHAR_T>(path.begin(), path.end()).c_str(),
                               options)) {
    check(ort->GetAllocatorWithDefaultOptions(&allocator_));
    std::size_t count = 0;
    check(ort->SessionGetInputCount(session_.get(), &count));
    outputs_.push_back("logits");
    for (std::size_t i = 0; i < count; ++i) {
      char* raw = nullptr;
      check(ort->SessionGetInputName(session_.get(), i, allocator_, &raw));
      const std::string name = raw;
      check(ort->AllocatorFree(allocator_, raw));
      const auto info = make<TypeInfo>(ort->SessionGetInputTypeInfo, session_.get(), i);
      const OrtTensorTypeAndShapeInfo* shape = nullptr;  // belongs to info
      check(ort->CastTypeInfoToTensorInfo(info.get(), &shape));
      Tensor tensor = tensor_of(shape);
      const std::string past = "past_key_values";
      if (name.rfind(past, 0) == 0) {
        tensor.shape[0] = 1;  // batch
        tensor.shape[2] = 0;  // nothing is cached yet
        inputs_.emplace_back(name, make<Value>(ort->CreateTensorAsOrtValue, allocator_, tensor.shape.data(),
                                               tensor.shape.size(), tensor.type));
        outputs_.push_back("present" + name.substr(past.size()));
      } else {
        plain_[name] = tensor.type;
      }
    }
  }

  // Runs `tokens` after what is cached; returns the likeliest next token.
  std::int64_t step(const std::vector<std::int64_t>& tokens) {
    const std::int64_t past = length_;
    length_ += static_cast<std::int64_t>(tokens.size());
    std::vector<std::int64_t> positions(tokens.size());
    for (std::size_t i = 0; i < positions.size(); ++i) positions[i] = past + static_cast<std::int64_t>(i);
    const std::map<std::string, std::vector<std::int64_t>> known = {
        {"input_ids", tokens},
        {"attention_mask", std::vector<std::int64_t>(static_cast<std::size_t>(length_), 1)},
        {"position_ids", positions}};
    const Binding binding = make<Binding>(ort->CreateIoBinding, session_.get());
    std::vector<Value> feeds;
    for (const auto& [name, type] : plain_) {
      const auto found = known.find(name);
      if (found == known.end()) throw std::runtime_error("the model has an input that this sample does not know: " + name);
      feeds.push_back(integers(found->second, type));
      check(ort->BindInput(binding.get(), name.c_str(), feeds.back().get()));
    }
    for (const auto& [name, value] : inputs_) check(ort->BindInput(binding.get(), name.c_str(), value.get()));
    const Memory here = memory_of("Cpu", 0);
    for (const std::string& name : outputs_) {
      const Memory& memory = name == outputs_[0] ? here : cache_memory_;  // logits are read here
      check(ort->BindOutputToDevice(binding.get(), name.c_str(), memory.get()));
    }
    check(ort->RunWithBinding(session_.get(), nullptr, binding.get()));
    std::vector<Value> results = results_of(binding.get());
    for (std::size_t i = 0; i < inputs_.size(); ++i) inputs_[i].second = std::move(results[i + 1]);  // of the next step
    return likeliest(results[0].get());
  }

 private:
  // What a run left, in the order of `outputs_`.
  std::vector<Value> results_of(const OrtIoBinding* binding) const {
    OrtValue** raw = nullptr;
    std::size_t count = 0;
    check(ort->GetBoundOutputValues(binding, allocator_, &raw, &count));
    std::vector<Value> results;
    for (std::size_t i = 0; i < count; ++i) results.emplace_back(raw[i]);
    check(ort->AllocatorFree(allocator_, raw));
    return results;
  }

  Value integers(const std::vector<std::int64_t>& numbers, ONNXTensorElementDataType type) const {
    const std::int64_t shape[2] = {1, static_cast<std::int64_t>(numbers.size())};
    Value value = make<Value>(ort->CreateTensorAsOrtValue, allocator_, &shape[0], std::size_t{2}, type);
    void* data = nullptr;
    check(ort->GetTensorMutableData(value.get(), &data));
    if (type == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64) {
      std::copy(numbers.begin(), numbers.end(), static_cast<std::int64_t*>(data));
    } else if (type == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32) {
      std::transform(numbers.begin(), numbers.end(), static_cast<std::int32_t*>(data),
                     [](std::int64_t number) { return static_cast<std::int32_t>(number); });
    } else {
      throw std::runtime_error("token ids and masks are int64 or int32");
    }
    return value;
  }

  static std::int64_t likeliest(OrtValue* logits) {
    const auto info = make<ShapeInfo>(ort->GetTensorTypeAndShape, logits);
    const Tensor tensor = tensor_of(info.get());
    const std::int64_t tokens = tensor.shape.at(1), words = tensor.shape.at(2);
    void* data = nullptr;
    check(ort->GetTensorMutableData(logits, &data));
    const std::int64_t start = (tokens - 1) * words;  // the last token's
    const auto value = [&](std::int64_t word) {
      if (tensor.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT) return static_cast<const float*>(data)[start + word];
      if (tensor.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16) {
        return half_to_float(static_cast<const std::uint16_t*>(data)[start + word]);
      }
      throw std::runtime_error("logits are float or float16");
    };
    std::int64_t best = 0;
    float most = value(0);
    for (std::int64_t word = 1; word < words; ++word) {
      const float here = value(word);
      if (here > most) {
        most = here;
        best = word;
      }
    }
    return best;
  }

  Memory cache_memory_;
  Session session_;
  OrtAllocator* allocator_ = nullptr;
  std::map<std::string, ONNXTensorElementDataType> plain_;
  std::vector<std::pair<std::string, Value>> inputs_;  // the cache
  std::vector<std::string> outputs_;
  std::int64_t length_ = 0;
};

// Lets sessions run on a GPU.
void use_cuda(OrtSessionOptions* options, const std::string& gpu) {
  const CudaOptions cuda = make<CudaOptions>(ort->CreateCUDAProviderOptions);
  const char* const keys[] = {"device_id"};
  const char* const values[] = {gpu.c_str()};
  check(ort->UpdateCUDAProviderOptions(cuda.get(), keys, values, 1));
  check(ort->SessionOptionsAppendExecutionProvider_CUDA_V2(options, cuda.get()));
}

int run(const std::vector<std::string>& arguments) {
  if (arguments.size() < 3) {
    std::fprintf(stderr,
                 "usage: generate RUNTIME MODEL [--library PATH] [--cuda GPU] [--count N] [--config KEY=VALUE] "
                 "TOKEN...\n");
    return 2;
  }
  const OrtApiBase* base = load_runtime(arguments[0].c_str());
  ort = base->GetApi(ORT_API_VERSION);
  if (ort == nullptr) {
    throw std::runtime_error("ONNX Runtime " + std::string(base->GetVersionString()) + " is older than this program");
  }
  const Env env = make<Env>(ort->CreateEnv, ORT_LOGGING_LEVEL_WARNING, "generate");
  const Options options = make<Options>(ort->CreateSessionOptions);
  std::vector<std::int64_t> tokens;
  Memory memory = memory_of("Cpu", 0);
  int count = 16;
  for (std::size_t i = 2; i < arguments.size(); ++i) {
    const bool more = i + 1 < arguments.size();
    if (arguments[i] == "--library" && more) {
      void* handle = nullptr;  // stays loaded: the session points into it
      check(ort->RegisterCustomOpsLibrary(options.get(), arguments[++i].c_str(), &handle));
    } else if (arguments[i] == "--cuda" && more) {
      use_cuda(options.get(), arguments[++i]);
      memory = memory_of("Cuda", std::stoi(arguments[i]));
    } else if (arguments[i] == "--count" && more) {
      count = std::stoi(arguments[++i]);
    } else if (arguments[i] == "--config" && more) {
      const std::string entry = arguments[++i];
      const std::size_t equals = entry.find('=');
      if (equals == std::string::npos) throw std::runtime_error("--config takes KEY=VALUE, not " + entry);
      check(ort->AddSessionConfigEntry(options.get(), entry.substr(0, equals).c_str(), entry.substr(equals + 1).c_str()));
    } else {
      std::size_t end = 0;
      const char first = arguments[i].empty() ? ' ' : arguments[i][0];
      if (first >= '0' && first <= '9') tokens.push_back(std::stoll(arguments[i], &end));
      if (end == 0 || end != arguments[i].size()) throw std::runtime_error("not a token id: '" + arguments[i] + "'");
    }
  }
  if (tokens.empty()) throw std::runtime_error("give at least one token");
  Decoder decoder(env.get(), arguments[1], options.get(), std::move(memory));
  for (int i = 0; i < count; ++i) {
    const std::int64_t next = decoder.step(tokens);
    std::printf(i == 0 ? "%lld" : " %lld", static_cast<long long>(next));
    tokens.assign(1, next);
  }
  std::printf("\n");
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(std::vector<std::string>(argv + 1, argv + argc));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "generate: %s\n", error.what());
    return 1;
  }
}

// What the library exports: RegisterCustomOps for ONNX Runtime, and the path in use for people and tests.
#include <array>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "attention/op.h"
#include "common/isa.h"
#include "cuda_build.h"
#include "hadamard/op.h"
#include "matmul/op.h"
#include "ort/abi.h"
#include "ort/glue.h"
#if GRAPHROT_CUDA
#include "attention/op_cuda.h"
#include "hadamard/op_cuda.h"
#include "matmul/op_cuda.h"
#endif

#if defined(_WIN32)
#define GRAPHROT_EXPORT extern "C" __declspec(dllexport)
#else
#define GRAPHROT_EXPORT extern "C" __attribute__((visibility("default")))
#endif

namespace graphrot {
namespace {

// The domain with its operators, for one runtime. A process can hold several runtimes (two packages that
// each bring their own), whose objects must not be mixed. Sessions keep pointers to the operators, so
// registrations last as long as the library.
struct Registration {
  explicit Registration(const void* const* table)
      : key(table),
        api(table),
        hadamard(each<HadamardOp>(api)),
        matmul(each<RotatedMatMulOp>(api)),
        attention(each<RotatedAttentionOp>(api))
#if GRAPHROT_CUDA
        ,
        cuda_hadamard(each<CudaHadamardOp>(api)),
        cuda_matmul(each<CudaRotatedMatMulOp>(api)),
        cuda_attention(each<CudaRotatedAttentionOp>(api))
#endif
  {
    ort::check(api, api.call<ort::slot::CreateCustomOpDomain>("graphrot", &domain));
    add(hadamard);
    add(matmul);
    add(attention);
#if GRAPHROT_CUDA
    add(cuda_hadamard);
    add(cuda_matmul);
    add(cuda_attention);
#endif
  }

  template <class Op>
  using Each = std::array<Op, kElementCount>;

  template <class Op>
  static Each<Op> each(const ort::Api& api) {
    return {Op(api, Element::kFloat), Op(api, Element::kHalf), Op(api, Element::kBFloat16)};
  }

  template <class Op>
  void add(const Each<Op>& ops) {
    for (const Op& op : ops) {
      const ort::CustomOp* const base = &op;
      ort::check(api, api.call<ort::slot::CustomOpDomain_Add>(domain, base));
    }
  }

  const void* key;
  ort::Api api;
  Each<HadamardOp> hadamard;
  Each<RotatedMatMulOp> matmul;
  Each<RotatedAttentionOp> attention;
#if GRAPHROT_CUDA
  Each<CudaHadamardOp> cuda_hadamard;
  Each<CudaRotatedMatMulOp> cuda_matmul;
  Each<CudaRotatedAttentionOp> cuda_attention;
#endif
  ort::CustomOpDomain* domain = nullptr;
};

ort::CustomOpDomain* domain_for(const void* const* table) {
  static std::mutex mutex;
  static std::vector<std::unique_ptr<Registration>> registrations;
  const std::lock_guard<std::mutex> lock(mutex);
  for (const auto& registration : registrations) {
    if (registration->key == table) return registration->domain;
  }
  registrations.push_back(std::make_unique<Registration>(table));
  return registrations.back()->domain;
}

}  // namespace
}  // namespace graphrot

GRAPHROT_EXPORT graphrot::ort::Status* GRAPHROT_ORT_CALL RegisterCustomOps(graphrot::ort::SessionOptions* options,
                                                                           const graphrot::ort::ApiBase* base) {
  using namespace graphrot;
  const void* const* table = base->GetApi(ort::kApiVersion);
  if (table == nullptr) {
    // Too old for our version of the table; its first one has what an error needs.
    const ort::Api oldest(base->GetApi(1));
    return oldest.call<ort::slot::CreateStatus>(ort::kFail, "graphrot needs ONNX Runtime 1.18 or later");
  }
  const ort::Api api(table);
  return ort::guarded(api, "graphrot", [&] {
    selected_isa();  // an impossible GRAPHROT_ISA is refused now, not at the first node
    ort::check(api, api.call<ort::slot::AddCustomOpDomain>(options, domain_for(table)));
  });
}

// Name of the instruction set that kernels made now would use, or "invalid" where GRAPHROT_ISA is impossible.
GRAPHROT_EXPORT const char* graphrot_isa() {
  try {
    return graphrot::isa_name(graphrot::selected_isa());
  } catch (...) {
    return "invalid";
  }
}

// What this build holds, for people and tools, as JSON:
// {"isas": [{"name", "built", "available"}], "kernels": [{"op", "type"}], "cuda": {"built", "compiler", "architectures",
// "reason"}}. Every kernel is there for the CPU and, where `cuda` is built, for CUDA. The text lives as long as the library.
GRAPHROT_EXPORT const char* graphrot_describe() {
  using namespace graphrot;
  try {
    static const std::string text = [] {
      const auto word = [](bool value) { return value ? "true" : "false"; };
      std::string result = "{\"isas\": [";
      for (const Isa isa : kIsas) {
        if (isa != kIsas[0]) result += ", ";
        result += std::string("{\"name\": \"") + isa_name(isa) + "\", \"built\": " + word(isa_built(isa)) +
                  ", \"available\": " + word(isa_available(isa)) + "}";
      }
      result += "], \"kernels\": [";
      for (const char* name : {HadamardOp::kName, RotatedMatMulOp::kName, RotatedAttentionOp::kName}) {
        for (int element = 0; element < kElementCount; ++element) {
          if (result.back() != '[') result += ", ";
          result += std::string("{\"op\": \"") + name + "\", \"type\": \"" +
                    element_name(static_cast<Element>(element)) + "\"}";
        }
      }
      return result + "], \"cuda\": " + kCudaDescription + "}";
    }();
    return text.c_str();
  } catch (...) {
    return "{}";
  }
}

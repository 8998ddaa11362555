// What the library exports: RegisterCustomOps for ONNX Runtime, and the path in use for people and tests.
#include <array>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "attention/op.h"
#include "common/isa.h"
#include "hadamard/op.h"
#include "matmul/op.h"
#include "ort/abi.h"
#include "ort/glue.h"

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
        hadamard{HadamardOp(api, Element::kFloat), HadamardOp(api, Element::kHalf), HadamardOp(api, Element::kBFloat16)},
        matmul{RotatedMatMulOp(api, Element::kFloat), RotatedMatMulOp(api, Element::kHalf),
               RotatedMatMulOp(api, Element::kBFloat16)},
        attention{RotatedAttentionOp(api, Element::kFloat), RotatedAttentionOp(api, Element::kHalf),
                  RotatedAttentionOp(api, Element::kBFloat16)} {
    ort::check(api, api.call<ort::slot::CreateCustomOpDomain>("graphrot", &domain));
    const auto add = [&](const ort::CustomOp& op) { ort::check(api, api.call<ort::slot::CustomOpDomain_Add>(domain, &op)); };
    for (const HadamardOp& op : hadamard) add(op);
    for (const RotatedMatMulOp& op : matmul) add(op);
    for (const RotatedAttentionOp& op : attention) add(op);
  }

  const void* key;
  ort::Api api;
  std::array<HadamardOp, kElementCount> hadamard;
  std::array<RotatedMatMulOp, kElementCount> matmul;
  std::array<RotatedAttentionOp, kElementCount> attention;
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
// {"isas": [{"name", "built", "available"}], "kernels": [{"op", "type"}]}. The text lives as long as the library.
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
      return result + "]}";
    }();
    return text.c_str();
  } catch (...) {
    return "{}";
  }
}

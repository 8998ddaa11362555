// What the operators have in common as ONNX Runtime sees them: one for each element type, kernels that throw.
#pragma once

#include <stdexcept>
#include <string>

#include "common/element.h"
#include "ort/abi.h"
#include "ort/glue.h"

namespace graphrot::ort {

struct ElementOp : CustomOp {
  ElementOp(const Api& table, Element type) : CustomOp{}, api(table), element(type) {}

  Api api;  // shape inference is called without one
  Element element;
};

inline const ElementOp& self(const CustomOp* op) { return *static_cast<const ElementOp*>(op); }

inline ElementType element_type(const CustomOp* op) {
  constexpr ElementType kTypes[kElementCount] = {kFloat32, kFloat16, kBFloat16};
  return kTypes[static_cast<int>(self(op).element)];
}

// The fields that make, run and drop kernels. `Kernel(api, info, element)` has api() and compute(context), and kWhere,
// with which its errors start; it may throw std::invalid_argument, which gets the node's name.
template <class Kernel>
void fill_kernel(ElementOp* op) {
  op->CreateKernelV2 = [](const CustomOp* made, const void* const* table, const KernelInfo* info, void** kernel) {
    const Api api(table);
    return guarded(api, Kernel::kWhere, [&] {
      const std::string node = node_name(api, info);
      try {
        *kernel = new Kernel(api, info, self(made).element);
      } catch (const std::invalid_argument& error) {
        throw std::invalid_argument("node '" + node + "': " + error.what());
      }
    });
  };
  op->KernelComputeV2 = [](void* kernel, KernelContext* context) {
    auto* own = static_cast<Kernel*>(kernel);
    return guarded(own->api(), Kernel::kWhere, [&] { own->compute(context); });
  };
  op->KernelDestroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
}

// The fields that are the same for every operator.
template <class Kernel>
void fill(ElementOp* op) {
  fill_kernel<Kernel>(op);
  op->version = kApiVersion;
  op->GetExecutionProviderType = [](const CustomOp*) -> const char* { return nullptr; };  // CPU
  op->GetOutputType = [](const CustomOp* made, std::size_t) { return element_type(made); };
  op->GetOutputTypeCount = [](const CustomOp*) { return std::size_t{1}; };
  op->GetOutputCharacteristic = [](const CustomOp*, std::size_t) { return kRequired; };
  op->GetInputMemoryType = [](const CustomOp*, std::size_t) { return kDefaultMemory; };
  op->GetStartVersion = [](const CustomOp*) { return 1; };
  op->GetEndVersion = [](const CustomOp*) { return 1; };
}

// `Inputs` inputs, of which all behind the first `Required` may be left out.
template <std::size_t Inputs, std::size_t Required>
void take_inputs(ElementOp* op) {
  op->GetInputTypeCount = [](const CustomOp*) { return Inputs; };
  op->GetInputCharacteristic = [](const CustomOp*, std::size_t index) {
    return index < Required ? kRequired : kOptional;
  };
}

}  // namespace graphrot::ort

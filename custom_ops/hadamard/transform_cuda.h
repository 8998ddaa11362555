// The transform of a node, with its factor on the device.
#pragma once

#include "hadamard/cuda.h"
#include "hadamard/hadamard.h"
#include "ort/abi.h"
#include "ort/cuda_glue.h"

namespace graphrot {

class CudaTransform {
 public:
  // `problem` is what read_transform made of the same node; `allocator` must live longer. Throws std::invalid_argument,
  // in words for people, when the transform does not fit the current device.
  CudaTransform(const ort::DeviceAllocator& allocator, const ort::KernelInfo* info, const HadamardProblem& problem);

  const CudaHadamard& problem() const { return problem_; }

 private:
  ort::DeviceBytes factor_;
  CudaHadamard problem_;
};

}  // namespace graphrot

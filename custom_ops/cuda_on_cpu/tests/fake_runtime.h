// A runtime of stand-ins behind the table of ONNX Runtime's C interface: nodes, tensors, calls and an allocator that
// counts, so that operators run as a session would run them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cuda_on_cpu/guarded.h"
#include "ort/abi.h"

namespace graphrot::fake {

struct Tensor {
  ort::ElementType type = ort::kUndefined;
  std::vector<std::int64_t> shape = {};
  std::shared_ptr<shim::GuardedBytes> memory = nullptr;  // copies share it

  std::size_t count() const;
  template <class T>
  std::vector<T> values() const {
    const auto* first = reinterpret_cast<const T*>(memory->data());
    return {first, first + count()};
  }
};

template <class T>
Tensor tensor(ort::ElementType type, std::vector<std::int64_t> shape, const std::vector<T>& values) {
  auto memory = std::make_shared<shim::GuardedBytes>(values.size() * sizeof(T));
  if (!values.empty()) std::memcpy(memory->data(), values.data(), memory->bytes());
  return {type, std::move(shape), std::move(memory)};
}

// Memory that the operators ask for.
struct Memory {
  std::map<void*, std::unique_ptr<shim::GuardedBytes>> taken;
  std::size_t scratch_taken = 0, constants_taken = 0;
  bool none_left = false, overwritten = false;  // beside what was taken
};

struct Input {
  std::string name;  // empty: left out
  const Tensor* constant = nullptr;
};

struct Node {
  std::string name;
  std::map<std::string, std::int64_t> ints;
  std::map<std::string, float> floats;
  std::map<std::string, std::vector<std::int64_t>> lists;
  std::map<std::string, Tensor> tensors;
  std::vector<Input> inputs;
  Memory* memory;
};

struct Call {
  std::vector<const Tensor*> inputs;  // null: left out
  std::vector<Tensor> outputs;  // of a type; memory is made when asked for, unless it is there and large enough
  Memory* memory;
  int streams_asked = 0;
};

const void* const* table();

// What a session does with an operator. The kernel's words, or none where all went well.
class Kernel {
 public:
  Kernel(const ort::CustomOp& op, Node& node);
  ~Kernel();
  Kernel(const Kernel&) = delete;
  Kernel& operator=(const Kernel&) = delete;

  const std::string& refused() const { return refused_; }
  std::string run(Call& call);

 private:
  const ort::CustomOp& op_;
  void* kernel_ = nullptr;
  std::string refused_;
};

}  // namespace graphrot::fake

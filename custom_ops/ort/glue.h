// C++ on this side, C on the runtime's: errors become statuses, and no exception crosses the boundary.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <exception>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "ort/abi.h"

namespace graphrot::ort {

// A failed call into the runtime, with its message.
class RuntimeFailure : public std::runtime_error {
 public:
  RuntimeFailure(ErrorCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  ErrorCode code() const { return code_; }

 private:
  ErrorCode code_;
};

struct InfoRelease {
  Api api;
  void operator()(TensorInfo* info) const { api.call<slot::ReleaseTensorTypeAndShapeInfo>(info); }
};

// Throws RuntimeFailure unless the status is null; releases it.
void check(const Api& api, Status* status);

// Runs `body`; what it throws comes back as a status that starts with `where`. std::invalid_argument is the
// caller's fault, anything else a failure.
template <class Body>
Status* guarded(const Api& api, const char* where, Body&& body) noexcept {
  const auto failed = [&](ErrorCode code, const char* what) noexcept -> Status* {
    try {
      return api.call<slot::CreateStatus>(code, (std::string(where) + ": " + what).c_str());
    } catch (...) {
      return api.call<slot::CreateStatus>(code, where);
    }
  };
  try {
    body();
    return nullptr;
  } catch (const std::invalid_argument& error) {
    return failed(kInvalidArgument, error.what());
  } catch (const RuntimeFailure& error) {
    return failed(error.code(), error.what());
  } catch (const std::bad_alloc&) {
    return failed(kFail, "out of memory");
  } catch (const std::exception& error) {
    return failed(kFail, error.what());
  } catch (...) {
    return failed(kFail, "unknown error");
  }
}

// Attributes of a node. All throw std::invalid_argument, naming the attribute, when it is absent or of another type.
std::int64_t attribute_int(const Api& api, const KernelInfo* info, const char* name);
float attribute_float(const Api& api, const KernelInfo* info, const char* name);
// Throws when it is not from `least` to `most`, too.
std::int64_t attribute_in_range(const Api& api, const KernelInfo* info, const char* name, std::int64_t least,
                                std::int64_t most);
std::vector<std::int64_t> attribute_ints(const Api& api, const KernelInfo* info, const char* name);

struct TensorAttribute {
  ElementType type;
  std::vector<std::int64_t> shape;
  std::vector<float> values;
};

// A tensor of int8 or float, as floats.
TensorAttribute attribute_tensor(const Api& api, const KernelInfo* info, const char* name);

// Input `index` of the node, which lives as long as the session. Throws std::invalid_argument, naming it, unless it is
// known when kernels are made.
const Value* constant_input(const Api& api, const KernelInfo* info, std::size_t index, const char* name);
// False where an optional input is left out.
bool has_input(const Api& api, const KernelInfo* info, std::size_t index);

std::string node_name(const Api& api, const KernelInfo* info);

std::vector<std::int64_t> shape_of(const Api& api, const Value* value, ElementType* type);

// [2, 3, 4], for messages.
std::string words(const std::vector<std::int64_t>& shape);

const void* data_of(const Api& api, const Value* value);
void* mutable_data_of(const Api& api, Value* value);

// The first failure among tasks that run at once. No std::exception_ptr: it would ask for a newer C++ library.
class FirstFailure {
 public:
  void keep(const char* what) noexcept {
    if (taken_.test_and_set()) return;
    failed_ = true;
    std::strncpy(message_, what, sizeof message_ - 1);
  }

  // After all tasks have ended.
  void rethrow() const {
    if (failed_) throw std::runtime_error(message_);
  }

 private:
  std::atomic_flag taken_ = ATOMIC_FLAG_INIT;
  bool failed_ = false;
  char message_[256] = {};
};

// Runs task(0) ... task(count - 1) on the session's threads, or here when there is one. Throws
// std::runtime_error with the words of what a task threw.
template <class Task>
void parallel_for(const Api& api, const KernelContext* context, std::size_t count, const Task& task) {
  if (count <= 1) {
    if (count == 1) task(0);
    return;
  }
  struct Shared {
    const Task* task;
    FirstFailure failure;
  } shared{&task, {}};
  const auto run = [](void* user, std::size_t index) noexcept {
    auto* data = static_cast<Shared*>(user);
    try {
      (*data->task)(index);
    } catch (const std::bad_alloc&) {
      data->failure.keep("out of memory");
    } catch (const std::exception& error) {
      data->failure.keep(error.what());
    } catch (...) {
      data->failure.keep("unknown error");
    }
  };
  void (*const function)(void*, std::size_t) = run;
  check(api, api.call<slot::KernelContext_ParallelFor>(context, function, count, std::size_t{0},
                                                       static_cast<void*>(&shared)));
  shared.failure.rethrow();
}

}  // namespace graphrot::ort

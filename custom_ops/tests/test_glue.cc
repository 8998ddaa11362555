// The glue to the runtime over a table of stand-ins: tasks that fail, and how errors become statuses.
#include <array>
#include <cstddef>
#include <new>
#include <stdexcept>
#include <string>

#include "ort/glue.h"
#include "tests/check.h"

using namespace graphrot::ort;

namespace {

std::string last_message;
ErrorCode last_code = kFail;

Status* GRAPHROT_ORT_CALL create_status(ErrorCode code, const char* message) {
  last_code = code;
  last_message = message;
  return reinterpret_cast<Status*>(&last_message);
}

Status* GRAPHROT_ORT_CALL run_all(const KernelContext*, void (*function)(void*, std::size_t), std::size_t total,
                                  std::size_t, void* user) {
  for (std::size_t i = 0; i < total; ++i) function(user, i);
  return nullptr;
}

std::array<const void*, 512> table{};

void tasks(const Api& api) {
  int done = 0;
  parallel_for(api, nullptr, 5, [&](std::size_t) { ++done; });
  EXPECT(done == 5, "every task ran: %d", done);
  parallel_for(api, nullptr, 0, [&](std::size_t) { ++done; });
  EXPECT(done == 5, "no task is none");
  const auto words = [&](auto&& task) -> std::string {
    try {
      parallel_for(api, nullptr, 3, task);
    } catch (const std::runtime_error& error) {
      return error.what();
    }
    return "nothing thrown";
  };
  EXPECT(words([](std::size_t i) { if (i > 0) throw std::runtime_error("task " + std::to_string(i)); }) == "task 1",
         "the first failure is told");
  EXPECT(words([](std::size_t) { throw std::bad_alloc(); }) == "out of memory", "memory is told");
  EXPECT(words([](std::size_t) { throw 1; }) == "unknown error", "anything is caught");
  EXPECT(words([](std::size_t) { throw std::runtime_error(std::string(1000, 'x')); }) == std::string(255, 'x'),
         "long words are cut");
}

void statuses(const Api& api) {
  EXPECT(guarded(api, "here", [] {}) == nullptr, "success is null");
  EXPECT(guarded(api, "here", [] { throw std::invalid_argument("wrong"); }) != nullptr, "a failure is a status");
  EXPECT(last_message == "here: wrong" && last_code == kInvalidArgument, "%s", last_message.c_str());
  guarded(api, "here", [] { throw std::bad_alloc(); });
  EXPECT(last_message == "here: out of memory" && last_code == kFail, "%s", last_message.c_str());
}

}  // namespace

int main() {
  table[slot::CreateStatus::kIndex] = reinterpret_cast<const void*>(&create_status);
  table[slot::KernelContext_ParallelFor::kIndex] = reinterpret_cast<const void*>(&run_all);
  const Api api(table.data());
  tasks(api);
  statuses(api);
  return graphrot::test::failures == 0 ? 0 : 1;
}

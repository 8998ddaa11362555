#include "cuda_on_cpu/fiber.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstring>
#include <new>

#if defined(__SANITIZE_ADDRESS__)
#define GRAPHROT_ADDRESS_SANITIZER 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define GRAPHROT_ADDRESS_SANITIZER 1
#endif
#endif

#if defined(GRAPHROT_ADDRESS_SANITIZER)
#include <sanitizer/common_interface_defs.h>
#endif

#if defined(__APPLE__)
#define GRAPHROT_SYMBOL "_graphrot_fiber_switch"
#else
#define GRAPHROT_SYMBOL "graphrot_fiber_switch"
#endif

// Keeps what a called function must keep, stores the stack pointer at *from, and comes back on the stack of `to`.
extern "C" void graphrot_fiber_switch(void** from, void* to);

#if defined(__x86_64__)

asm(".text\n.globl " GRAPHROT_SYMBOL "\n" GRAPHROT_SYMBOL ":\n"
    "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
    "  movq %rsp, (%rdi)\n  movq %rsi, %rsp\n"
    "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbx\n  popq %rbp\n  ret\n");

namespace {

constexpr std::size_t kSaved = 6, kEntry = 6, kWords = 8;  // registers, where to return to, and an empty word

}  // namespace

#elif defined(__aarch64__)

asm(".text\n.p2align 2\n.globl " GRAPHROT_SYMBOL "\n" GRAPHROT_SYMBOL ":\n"
    "  sub sp, sp, #160\n"
    "  stp x19, x20, [sp, #0]\n  stp x21, x22, [sp, #16]\n  stp x23, x24, [sp, #32]\n"
    "  stp x25, x26, [sp, #48]\n  stp x27, x28, [sp, #64]\n  stp x29, x30, [sp, #80]\n"
    "  stp d8, d9, [sp, #96]\n  stp d10, d11, [sp, #112]\n  stp d12, d13, [sp, #128]\n  stp d14, d15, [sp, #144]\n"
    "  mov x9, sp\n  str x9, [x0]\n  mov sp, x1\n"
    "  ldp x19, x20, [sp, #0]\n  ldp x21, x22, [sp, #16]\n  ldp x23, x24, [sp, #32]\n"
    "  ldp x25, x26, [sp, #48]\n  ldp x27, x28, [sp, #64]\n  ldp x29, x30, [sp, #80]\n"
    "  ldp d8, d9, [sp, #96]\n  ldp d10, d11, [sp, #112]\n  ldp d12, d13, [sp, #128]\n  ldp d14, d15, [sp, #144]\n"
    "  add sp, sp, #160\n  ret\n");

namespace {

constexpr std::size_t kSaved = 20, kEntry = 11, kWords = 20;  // of which the twelfth is where to return to

}  // namespace

#else
#error "fibers are written for x86-64 and aarch64"
#endif

namespace graphrot::shim {
namespace {

Fiber* left = nullptr;  // who switched to the one that is running

}  // namespace

Fiber::Fiber(unsigned char* stack, std::size_t bytes, void (*entry)()) : stack_(stack), bytes_(bytes) {
  const std::uintptr_t top = (reinterpret_cast<std::uintptr_t>(stack) + bytes) / 16 * 16;
  auto* const words = reinterpret_cast<void**>(top) - kWords;
  for (std::size_t i = 0; i < kWords; ++i) words[i] = nullptr;
  static_assert(kSaved <= kWords, "room for the registers");
  void* address;
  static_assert(sizeof address == sizeof entry, "a function's address is an address");
  std::memcpy(&address, &entry, sizeof address);
  words[kEntry] = address;
  place_ = words;
}

void Fiber::switch_to(Fiber& next, bool last) {
  left = this;
#if defined(GRAPHROT_ADDRESS_SANITIZER)
  __sanitizer_start_switch_fiber(last ? nullptr : &shadow_, next.stack_, next.bytes_);
#else
  (void)last;
#endif
  graphrot_fiber_switch(&place_, next.place_);
#if defined(GRAPHROT_ADDRESS_SANITIZER)
  __sanitizer_finish_switch_fiber(shadow_, &left->stack_, &left->bytes_);
#endif
}

void Fiber::entered() {
#if defined(GRAPHROT_ADDRESS_SANITIZER)
  __sanitizer_finish_switch_fiber(nullptr, &left->stack_, &left->bytes_);
#endif
}

unsigned char* fiber_stacks(std::size_t count) {
  static unsigned char* memory = nullptr;
  static std::size_t held = 0;
  if (count <= held) return memory;
  if (memory != nullptr) munmap(memory, held * kStackStep);
  held = 0;
  void* const fresh = mmap(nullptr, count * kStackStep, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (fresh == MAP_FAILED) throw std::bad_alloc();
  memory = static_cast<unsigned char*>(fresh);
  for (std::size_t i = 0; i < count; ++i) {
    unsigned char* const stack = memory + i * kStackStep + (kStackStep - kStackBytes);
    if (mprotect(stack, kStackBytes, PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
  }
  held = count;
  return memory;
}

}  // namespace graphrot::shim

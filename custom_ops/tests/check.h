// The least that a test needs: count failures, say where, and return them from main.
#pragma once

#include <cstdio>

namespace graphrot::test {

inline int failures = 0;

}  // namespace graphrot::test

#define EXPECT(condition, ...)                                            \
  do {                                                                    \
    if (!(condition)) {                                                   \
      ++graphrot::test::failures;                                         \
      std::fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #condition); \
      std::fprintf(stderr, __VA_ARGS__);                                  \
      std::fprintf(stderr, "\n");                                         \
    }                                                                     \
  } while (false)

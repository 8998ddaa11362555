// What a core can do at most.
#pragma once

#include <cstddef>

#include "common/isa.h"

namespace graphrot {

// Makes `rounds` rounds of independent multiply-adds of bytes in registers; returns how many multiply-adds that were.
// 0: there is no loop for the instruction set.
double multiply_adds(Isa isa, std::size_t rounds);

}  // namespace graphrot

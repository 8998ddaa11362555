// Shape inference of the operators.
#pragma once

#include <cstddef>

#include "ort/abi.h"

namespace graphrot::ort {

// The output has the shape of the first input.
void pass_shape_on(const Api& api, ShapeInferContext* context);

// The output has the shape of the first input, but for the last axis: the node's attribute `name` says how long it is.
void pass_shape_on_with_last(const Api& api, ShapeInferContext* context, const char* name);

// Output `output` has the shape of input `input`, but for one axis, whose extent is not known.
void pass_shape_on_but(const Api& api, ShapeInferContext* context, std::size_t input, std::size_t output,
                       std::size_t axis);

}  // namespace graphrot::ort

"""Integer grids for weights and activations, and the solvers that round weights to them."""

"""Learning rotations: orthogonal matrices that lower what rounding costs, found by descent on the Stiefel manifold."""

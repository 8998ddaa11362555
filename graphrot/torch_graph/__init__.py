"""Differentiable execution of ONNX graphs in torch, for learning rotations. Needs torch."""

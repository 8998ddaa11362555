"""Models for ONNX Runtime's CUDA provider: which kernels it has, what is written for it, and a check of that."""

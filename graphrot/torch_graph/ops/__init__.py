"""ONNX operators in torch, one function each."""

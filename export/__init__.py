"""Hope models in torch files: data, training, ONNX export, and proof of equality."""

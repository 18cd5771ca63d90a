"""Calibrated quantization: codes that make the outputs of a layer right for the inputs that it gets, for every format."""

"""The Triton kernels of a format."""

"""`python -m bench.gpu`: checks kernels, measures the device and times products on one GPU, in minutes."""

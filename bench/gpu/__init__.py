"""`python -m bench.gpu`: on one GPU, in minutes: are the kernels right, what does the device do, how fast is it all."""

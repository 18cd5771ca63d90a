"""Entropy coding of the exponents of bfloat16 weights, in numpy and C: code tables, bit streams, and the tensors of df11."""

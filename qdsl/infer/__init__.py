"""Infers a spec from stored tensors and their decoded weights: the positions of code bits, and the numbers that decode them."""

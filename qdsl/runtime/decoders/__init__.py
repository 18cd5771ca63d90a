"""Kernels of the entropy codes of qdsl/entropy, a module for each; runtime/codings launches them."""

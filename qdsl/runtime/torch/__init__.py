"""Packed weights as PyTorch has them: registered operations, layers, and models whose layers are replaced."""

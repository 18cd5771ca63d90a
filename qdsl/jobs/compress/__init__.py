"""Compresses checkpoints without loss, and decompresses them.

The processes that do the work read their own weights alone, and have numpy, no torch.
"""

"""Whole checkpoints without loss in fewer bits, and back: which weights are held together, and what they become.

The processes that do the work read their own weights alone, and have numpy, no torch.
"""

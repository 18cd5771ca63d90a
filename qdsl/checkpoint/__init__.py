"""Checkpoints on disk: files and layers, parsed with bounds checks and written atomically."""

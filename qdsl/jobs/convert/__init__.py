"""Whole checkpoints into another storage: what becomes of every layer, and what the config says of it then."""

"""Converts whole checkpoints to another storage: the new tensors of every layer, and the settings in the config."""

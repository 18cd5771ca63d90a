"""Checkpoints as running models: a model's modules filled with packed weights, and saved again."""

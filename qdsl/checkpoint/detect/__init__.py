"""Detects the quantized layers of a checkpoint, with format and storage."""

"""Checkpoints on disk: what lies in them, read with suspicion and written so that a crash leaves no half a file."""

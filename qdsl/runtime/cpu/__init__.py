"""Products on a CPU, in tiles that are decoded and multiplied, compiled where asked, or by torch's int4 operations."""

"""Products on a CPU: tiles that are decoded and multiplied, by compiled loops or torch, or torch's int4 operations."""

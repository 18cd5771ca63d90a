"""On PYTHONPATH before Triton, this is a machine without it."""

raise ImportError("No module named 'triton'")

"""Measures the project's goals for speed and length: `python -m bench`."""

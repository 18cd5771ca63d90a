"""What the project promises to be fast or short, measured: `python -m bench`."""

"""Prints the Triton functions of a format."""

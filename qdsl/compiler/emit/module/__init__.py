"""Prints a generated module, and the description of its format as data."""

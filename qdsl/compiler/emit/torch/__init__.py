"""Prints the torch reference of a format."""

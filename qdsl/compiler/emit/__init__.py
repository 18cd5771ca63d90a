"""Prints formats: torch references, Triton kernels, modules, pictures and pages.  Knows no YAML."""

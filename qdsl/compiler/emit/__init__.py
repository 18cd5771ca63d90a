"""How a format is said: torch reference, Triton kernels, modules, pictures and pages.  Knows no YAML."""

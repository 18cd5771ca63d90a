"""C of a format: the short functions that complete the loops on a CPU."""

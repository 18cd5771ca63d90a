"""Tests derived from a spec: what `qdsl test` runs, for every storage and choice of parameters."""

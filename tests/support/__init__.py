"""Shared by tests: an interpreter that checks addresses, an independent reading of specs, strategies, sample data."""

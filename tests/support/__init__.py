"""What tests share: the interpreter with checked addresses, an independent reading of specs, strategies, sample data."""

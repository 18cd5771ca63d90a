"""A generated module as a whole, and its description of the format as data."""

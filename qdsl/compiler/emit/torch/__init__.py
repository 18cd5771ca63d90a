"""The torch reference of a format."""

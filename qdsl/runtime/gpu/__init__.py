"""What runs on a GPU."""

"""A format for people: its page and the picture of its bits."""

"""Shows a format to people: its page and the picture of its bits."""

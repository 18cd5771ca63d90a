"""The code `window`: four bits per symbol, and a list of symbols outside of the window of sixteen."""

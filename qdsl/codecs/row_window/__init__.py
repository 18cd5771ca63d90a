"""The code `row_window`: three bits per symbol from a base of each row, and a list of symbols outside of the window of eight."""

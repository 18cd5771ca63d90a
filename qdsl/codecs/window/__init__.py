"""The code `window`: four bits a symbol, and a list of the symbols that lie outside of its sixteen."""

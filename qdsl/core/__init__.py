"""The base of all other packages: number types, layouts, shapes and the description of a format.  No torch."""

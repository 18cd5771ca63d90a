"""What everything stands on: number types, layouts, shapes and the description of a format.  No torch."""

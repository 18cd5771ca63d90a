"""Which layers of a checkpoint are quantized, in which format and storage."""

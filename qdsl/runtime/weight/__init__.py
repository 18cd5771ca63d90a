"""A quantized weight: its tensors, what a format says of them, and what is done to it without a product."""

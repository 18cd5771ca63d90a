"""A spec from stored tensors and the weights they stand for: where the bits of codes lie, and which numbers decode them."""

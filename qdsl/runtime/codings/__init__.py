"""Launches of the kernels of entropy codes (runtime/decoders): a module for each code.

A module has `open_calls`, which makes the elements that a stream holds, and where a weight can be made of them in registers,
two neighbours at a time, `dequantize_calls` and `few_calls`.  `row_band` takes rows out of a stream whose groups of
`group_rows` rows share no code.  All take tensors that qdsl/entropy has checked, by its names for
them: a stream that passed and is damaged nevertheless gives wrong numbers, and no address outside a tensor.
"""

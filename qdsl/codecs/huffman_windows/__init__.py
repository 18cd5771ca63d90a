"""The code `huffman_windows`: DFloat11's Huffman code of at most 32 bits, decoded in windows."""

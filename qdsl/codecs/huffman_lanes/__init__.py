"""The code `huffman_lanes`: a Huffman code of at most eight bits, decoded in lanes."""

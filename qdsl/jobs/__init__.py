"""Work on whole checkpoints and files, safe to interrupt: converting, compressing, and writing GGUF."""

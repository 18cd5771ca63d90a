"""Files of checkpoints: safetensors, GGUF and folders of them, read and written with bounded parsers."""

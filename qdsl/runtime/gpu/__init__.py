"""What a launch costs on a GPU, and which GPUs there are."""

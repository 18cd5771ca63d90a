"""What runs on GPUs: the choice of a launch, its cost, and Triton."""

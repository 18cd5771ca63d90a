"""What launches cost on GPUs, and the GPUs that costs are modelled for."""

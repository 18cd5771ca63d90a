"""What a checkpoint holds, how engines divide it, and whether two checkpoints hold the same."""

"""Tree attention in Triton, for GPUs."""

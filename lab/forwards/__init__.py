"""What forwards of well-known models take on a GPU that is here, beside what its data sheet says."""

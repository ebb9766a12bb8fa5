"""The compiled noise and choice: how `kernels/native`'s C functions are called for rows of requests."""

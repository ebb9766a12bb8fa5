"""The compiled noise, choice and ranking: how C functions of `kernels/native` are called for requests."""

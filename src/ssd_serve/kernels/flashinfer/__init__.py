"""Tree attention by FlashInfer's kernels, on GPUs of NVIDIA and AMD. On AMD's nothing here has run yet."""

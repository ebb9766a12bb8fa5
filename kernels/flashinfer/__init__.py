"""Tree attention by FlashInfer's kernels, on GPUs of NVIDIA and AMD. Nothing here has run on any GPU yet."""

"""Names of torch's dtypes for people, files and tables."""

import torch


def dtype_name(dtype: torch.dtype) -> str:
    """Short: `bfloat16`, `float8_e4m3fn`. torch has it as an attribute of that name."""
    return str(dtype).removeprefix("torch.")

"""A draft as good as wanted: a copy of the target whose weights carry seeded noise.

For benchmarks that ask what an engine gives with a better draft than there is; such a draft is as large as
its target, so that it means something on emulated devices only. Knows checkpoints, not how drafts are judged.
"""

from pathlib import Path

import torch

from ssd_serve.base.errors import UserError
from ssd_serve.recipes.checkpoint import (
    TOKENIZER_FILES,
    read_checkpoint,
    replaced_folder,
    write_json,
    write_weights,
)


def blur(source: Path, destination: Path, noise: float, seed: int = 0) -> None:
    """Write `source` to `destination` with every matrix w replaced by w + noise * std(w) * normal."""
    if noise < 0:
        raise UserError(f"the noise must not be negative, not {noise}")
    checkpoint = read_checkpoint(source)
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: weight
        if weight.dim() < 2
        else (
            weight.float() + noise * weight.float().std() * torch.randn(weight.shape, generator=generator)
        ).to(weight.dtype)
        for name, weight in checkpoint.weights.items()
    }
    with replaced_folder(destination) as folder:
        write_json(folder / "config.json", checkpoint.config)
        write_weights(weights, folder)
        for name in TOKENIZER_FILES:
            if (source / name).is_file():
                (folder / name).write_bytes((source / name).read_bytes())

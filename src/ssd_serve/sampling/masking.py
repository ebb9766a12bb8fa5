"""Leaving tokens out that a mask does not allow. Knows rows of logits, not where their masks come from."""

from collections.abc import Sequence

import numpy as np
import torch

from ssd_serve.sampling.grammar import Mask


def only_masked(logits: torch.Tensor, masks: Sequence[Mask | None]) -> torch.Tensor:
    """Float [rows, vocabulary] without what the rows' masks leave out, which is -inf; a new tensor where
    there are masks."""
    places = [place for place, mask in enumerate(masks) if mask is not None]
    if not places:
        return logits
    packed = np.stack([mask for mask in masks if mask is not None]).view(np.uint8)
    bits = np.unpackbits(packed, axis=1, count=logits.shape[1], bitorder="little")  # [masked, vocabulary]
    allowed = torch.from_numpy(bits.view(np.bool_)).to(logits.device)
    index = torch.tensor(places).to(logits.device)
    masked = torch.where(allowed, logits.index_select(0, index), -torch.inf)
    return logits.index_copy(0, index, masked)

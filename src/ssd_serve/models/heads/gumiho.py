"""A Gumiho head (arXiv 2503.10135): two layers in series for the next two tokens, then a head for each later one.

The layers read a token and a vector of the place before it, as EAGLE-1's do. The heads read what enters the layers of
both drafted tokens. Vectors stand for the target's normed last hidden states: the target's LM head makes logits.
"""

import torch
from torch.nn import functional

from ssd_serve.models.heads.eagle import EagleHead


class GumihoHead(EagleHead):
    """`Model` of the layers; `guess` runs the heads."""

    @property
    def guesses(self) -> int:
        """Number of heads."""
        return len(self._weights.guesses)

    @torch.inference_mode()
    def join(self, tokens: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
        """Return the heads' input, [rows, 2 * hidden].

        `tokens` [rows, 2] are the first two drafted ones, `vectors` [rows, 2, hidden] those that the layers made at
        the places before them.
        """
        embedded = self._embedding.index_select(0, tokens.flatten().to(self._device))
        return self._weights.fuse(torch.cat((embedded, vectors.flatten(0, 1)), dim=-1)).view(len(tokens), -1)

    @torch.inference_mode()
    def guess(self, index: int, joined: torch.Tensor) -> torch.Tensor:
        """Return logits of the token `index` + 3 places after the last committed one, float32 [rows, proposed]."""
        first, *rest = self._weights.guesses[index]
        rows = functional.silu(first(joined))
        for block in rest:
            rows = rows + functional.silu(block(rows))
        return self._head(rows).float()

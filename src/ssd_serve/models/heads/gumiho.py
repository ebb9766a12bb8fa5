"""A Gumiho head (arXiv 2503.10135): two layers in series for the next two tokens, then a head for each later one.

The layers read a token and a vector of the place before it, as EAGLE-1's do. The heads read what enters the layers of
both drafted tokens. Vectors stand for the target's normed last hidden states: the target's LM head makes logits.
"""

import torch
from torch.nn import functional

from ssd_serve.models.architectures.contract import ModelParts
from ssd_serve.models.heads.config import EagleConfig
from ssd_serve.models.heads.eagle import OWN, EagleHead, EagleWeights
from ssd_serve.models.interface import Inputs


class GumihoHead(EagleHead):
    """`Model` of the layers; `guess` runs the heads."""

    def __init__(self, config: EagleConfig, weights: EagleWeights, parts: ModelParts) -> None:
        super().__init__(config, weights, parts)
        self._layers = (
            (None, weights.blocks),
            *((each.input_norm, each.blocks) for each in weights.more_layers),
        )

    @property
    def guesses(self) -> int:
        """Number of heads."""
        return len(self._weights.guesses)

    def run(self, inputs: Inputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """See `EagleHead.run`."""
        if inputs.vectors is None or inputs.wanted is None:
            raise ValueError("a head's rows carry vectors")
        operations, rotations = self._operations, self._rotations.index_select(0, inputs.positions)
        hidden = self._joined(inputs.tokens, inputs.vectors)
        for index, (norm, blocks) in enumerate(self._layers):
            read = self._normed(hidden, norm)
            added = blocks.output(self._attend(index, blocks, read, rotations, inputs.plan))
            rows = operations.norm(hidden, added, blocks.mlp_norm)
            hidden = hidden + blocks.down(operations.gate(blocks.gate_up(rows)))
        own = hidden.index_select(0, inputs.wanted)
        return self._head(own).float(), {OWN: own}

    @torch.inference_mode()
    def join(self, tokens: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
        """Return the heads' input, [rows, 2 * hidden].

        `tokens` [rows, 2] are the first two drafted ones, `vectors` [rows, 2, hidden] those that the layers made at
        the places before them.
        """
        joined = self._joined(tokens.flatten().to(self._device), vectors.flatten(0, 1))
        return joined.view(len(tokens), -1)

    @torch.inference_mode()
    def guess(self, index: int, joined: torch.Tensor) -> torch.Tensor:
        """Return logits of the token `index` + 3 places after the last committed one, float32 [rows, proposed]."""
        first, *rest = self._weights.guesses[index]
        rows = functional.silu(first(joined))
        for block in rest:
            rows = rows + functional.silu(block(rows))
        return self._head(rows).float()

    def _joined(self, tokens: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
        embedded = self._embedding.index_select(0, tokens)
        return self._weights.fuse(torch.cat((embedded, vectors), dim=-1))

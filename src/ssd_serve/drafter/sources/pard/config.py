"""Configuration of PARD and PARD-2 drafts: keys of `config.json` besides those of the whole model.

Sources: An et al. 2025 (PARD, arXiv 2504.18583) and 2026 (PARD-2, 2605.08632), and the keys that their training writes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ssd_serve.base.draft_messages import FINAL
from ssd_serve.base.errors import CheckpointError
from ssd_serve.models.config import Json, positive_size
from ssd_serve.models.heads.config import check_features

_POSITIONS = 12
"""Positions of a block in AMD's evaluations; published configurations name none."""


@dataclass(frozen=True, slots=True)
class PardConfig:
    """`mask` is the token below an anchor at all positions of its block but the first."""

    mask: int
    positions: int
    """Positions that an anchor drafts."""
    features: tuple[int, ...] = ()
    """PARD-2: the target's outputs that it reads, in the order in which they are concatenated."""
    width: int = 0
    """PARD-2: numbers of these outputs at one position."""
    scale: float = 0.0
    """PARD-2: factor on the projected outputs."""
    bias: bool = False
    """PARD-2: the projection has a bias."""


def is_pard2(raw: Json) -> bool:
    """True if the draft reads outputs of its target."""
    return bool(raw.get("pard2")) or raw.get("spd_type") == "pard2"


def parse_pard(raw: Json, depth: int, target_layers: int = 0, target_hidden: int = 0) -> PardConfig:
    """Read `config.json`; blocks have at most `depth` positions. The target's sizes are for PARD-2.

    What cannot be computed exactly is a `CheckpointError`.
    """
    mask, vocabulary = raw.get("pard_token"), positive_size(raw, "vocab_size")
    if not isinstance(mask, int) or not 0 <= mask < vocabulary:
        raise CheckpointError(
            f"config.json: pard_token {mask!r} is none of the draft's {vocabulary} tokens (0 to {vocabulary - 1})"
        )
    positions = min(depth, positive_size({"pard_k": _POSITIONS, **raw}, "pard_k"))
    if not is_pard2(raw):
        return PardConfig(mask, positions)
    features = _outputs(raw.get("pard2_target_layers") or (), target_layers)
    width = positive_size(raw, "pard2_target_dim")
    if width != len(features) * target_hidden:
        raise CheckpointError(
            f"the draft reads {width} numbers (pard2_target_dim) at each position; {len(features)} outputs of this "
            f"target have {len(features) * target_hidden}: it belongs to another target"
        )
    scale, bias = float(raw.get("pard2_scale", 0.02)), bool(raw.get("pard2_proj_bias"))
    return PardConfig(mask, positions, features, width, scale, bias)


def _outputs(named: Sequence[int], layers: int) -> tuple[int, ...]:
    """Outputs of layers, from indices into Hugging Face's `hidden_states`: the embedding, each layer's output, and for
    the last layer the normed one."""
    places = [each + layers + 1 if each < 0 else each for each in named]
    if not places or 0 in places:
        raise CheckpointError(
            "config.json: pard2_target_layers must name outputs of layers; 0, the embedding, is not supported"
        )
    outputs = tuple(FINAL if place == layers else place - 1 for place in places)
    check_features([each for each in outputs if each != FINAL], layers)
    return outputs

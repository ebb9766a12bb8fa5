"""Configuration of DFlash, DFlash 2 and DSpark heads, in the layouts of `config.json` in which they are published.

Flat with `dflash_config` (z-lab), flat (DeepSeek), or nested (speculators). Knows key names; no tensors. Sources:
arXiv 2602.06036 (DFlash), the repositories of z-lab, DeepSpec and speculators, and vLLM's loaders.
"""

from dataclasses import dataclass, replace
from typing import Literal

from ssd_serve.base.errors import CheckpointError
from ssd_serve.models.architectures.dense.config import DecoderConfig
from ssd_serve.models.architectures.registry import describe
from ssd_serve.models.config import Json, positive_size
from ssd_serve.models.heads.config import HeadConfig

_FAMILIES = ("qwen3", "llama")
"""Heads have Qwen 3's layers for targets of any family; some call themselves after their target."""
_OTHERS = {
    **{"attention_sink_bias": False, "lilicorr_candidate_topk": None, "is_neox_style": True},
    **{"input_embedding_scale": 1.0, "output_multiplier": 1.0, "final_logit_softcapping": 0.0},
}
"""Keys that may have no other value: they belong to heads for targets that are not supported either."""


@dataclass(frozen=True, slots=True)
class PairConfig:
    """A low-rank score for each pair of neighbouring tokens.

    `markov` and `gated` (DSpark): the token before gives a vector, times a gate by the row, and the score of the whole
    vocabulary. `selector` (DFlash 2): vector and row are multiplied, and only the best candidates have scores.
    """

    form: Literal["markov", "gated", "selector"]
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashConfig(HeadConfig):
    """Configuration that decides the computation of a head; its layers are a Qwen 3 model's."""

    draft_vocabulary: int
    features: tuple[int, ...]
    """Layers of the target, by number from 0, with outputs that are concatenated in this order."""
    block: int
    """Rows of a block: the anchor and copies of the mask token."""
    mask: int
    from_anchor: bool
    """True: each row guesses the token after its position (DSpark). False: the token at it, the anchor's row none."""
    causal: tuple[bool, ...]
    """True for layers in which rows of a block see no later ones."""
    pairs: PairConfig | None = None
    taps: int = 0
    """Rows that a convolution reads (DFlash 2), each row's own included; 0: there are no convolutions."""
    group: int = 1
    """Channels that share the coefficients of a convolution."""
    ahead: bool = False
    """True: while the target verifies, likely outcomes are anchors."""
    gap: bool = False
    """True: trained with anchors that lack the features before them, which then begin blocks. False: tokens without
    features replace masks."""

    @property
    def positions(self) -> int:
        """Tokens that a block guesses."""
        return self.block if self.from_anchor else self.block - 1


def parse_dflash(raw: Json, generation: Json) -> DFlashConfig:
    """Read `config.json`. What cannot be computed exactly is a `CheckpointError`."""
    keys: Json = {**raw, **(raw.get("dspark_config") or {}), **(raw.get("dflash_config") or {})}
    inner: Json = raw.get("transformer_layer_config") or raw
    if inner.get("model_type", "qwen3") not in _FAMILIES:
        raise CheckpointError(
            f"a DFlash head with layers of {inner['model_type']} is not supported, only of {', '.join(_FAMILIES)}"
        )
    for name, usual in _OTHERS.items():
        if keys.get(name) not in (None, usual):
            raise CheckpointError(f"a DFlash head with {name} {keys[name]} is not supported")
    layers, published = positive_size(inner, "num_hidden_layers"), "speculators_model_type" in raw
    sliding = [each == "sliding_attention" for each in inner.get("layer_types") or [""] * layers]
    if published:
        causal = sliding if keys.get("sliding_window_non_causal") is False else [False] * layers
    else:
        stated = next((keys[name] for name in ("is_causal", "causal") if keys.get(name) is not None), None)
        causal = sliding if stated is None else [bool(stated)] * layers
    layer = _layers(inner, raw, keys, generation, [True] * layers if keys.get("use_swa") else sliding)
    if not isinstance(mask := keys.get("mask_token_id"), int):
        raise CheckpointError("config.json: mask_token_id must be the number of the mask token")
    usual_sizes = {"block_size": 16, "conv_group_size": 16, "conv_kernel_size": 2, **keys}
    block, group, taps = (positive_size(usual_sizes, name) for name in list(usual_sizes)[:3])
    pairs = _pairs(keys)
    if block < 2 or layer.hidden % group:
        raise CheckpointError(
            f"config.json: a block of {block} rows, or groups of {group} of {layer.hidden} channels"
        )
    return DFlashConfig(
        layer=layer,
        draft_vocabulary=int(raw.get("draft_vocab_size") or layer.vocabulary),
        features=_features(keys, layers, published),
        block=block,
        mask=mask,
        from_anchor=bool(
            keys.get("sample_from_anchor", not published and "DSpark" in str(raw.get("architectures")))
        ),
        causal=tuple(causal),
        pairs=pairs,
        taps=taps if pairs is not None and pairs.form == "selector" else 0,
        group=group,
        ahead=bool(keys.get("draft_ahead")),
        gap=bool(keys.get("context_gap")),
    )


def _layers(inner: Json, raw: Json, keys: Json, generation: Json, sliding: list[bool]) -> DecoderConfig:
    """The layers as a Qwen 3 model; `layer_types` decides on windows, not `use_sliding_window`."""
    window = keys.get("swa_window_size") or inner.get("sliding_window")
    if any(sliding) and not window:
        raise CheckpointError("config.json: layers of type sliding_attention need sliding_window")
    usual = {
        "architectures": ["Qwen3ForCausalLM"],
        "quantization_config": raw.get("quantization_config"),
        "tie_word_embeddings": False,
        "use_sliding_window": False,
    }
    config = describe({**inner, **usual}, generation).config
    if not isinstance(config, DecoderConfig) or len(sliding) != config.layers:
        raise CheckpointError("config.json does not describe the layers of a DFlash head")
    return replace(config, windows=tuple(int(window or 0) if each else None for each in sliding))


def _features(keys: Json, layers: int, published: bool) -> tuple[int, ...]:
    """Outputs of layers. Speculators names the inputs of the layers after them; z-lab may name none."""
    named = keys.get("aux_hidden_state_layer_ids" if published else "target_layer_ids") or ()
    if named:
        return tuple(int(each) - published for each in named)
    if not (theirs := keys.get("num_target_layers")):
        raise CheckpointError("config.json names no target layers for the head to read")
    if layers == 1:
        return (int(theirs) // 2,)
    return tuple(round(1 + index * (int(theirs) - 4) / (layers - 1)) for index in range(layers))


def _pairs(keys: Json) -> PairConfig | None:
    if keys.get("selector_rank") is not None:
        return PairConfig("selector", positive_size(keys, "selector_rank"))
    if not keys.get("markov_rank"):
        return None
    form = str(keys.get("markov_head_type") or "vanilla")
    if form not in ("vanilla", "gated"):
        raise CheckpointError(
            f"a DSpark head with markov_head_type {form!r} is not supported, only vanilla and gated: its scores "
            "depend on more than two neighbouring tokens"
        )
    return PairConfig("gated" if form == "gated" else "markov", positive_size(keys, "markov_rank"))

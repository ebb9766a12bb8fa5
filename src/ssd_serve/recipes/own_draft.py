"""A person's own draft as a training decoder, and back: names, dtypes and what is tied stay as they were.

Knows Llama checkpoints; says by name what the training decoder cannot compute.
"""

from pathlib import Path

from torch import Tensor

from ssd_serve.base.errors import UserError
from ssd_serve.recipes.checkpoint import LlamaCheckpoint, shape_of
from ssd_serve.recipes.decoder import Decoder

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def read_own_draft(checkpoint: LlamaCheckpoint, folder: Path) -> Decoder:
    """The draft in fp32, ready to learn. What cannot be trained is a `UserError`."""
    config, weights = checkpoint.config, checkpoint.weights
    if config.get("quantization_config"):
        raise UserError(f"{folder} is quantised: a draft learns from weights of 16 bits or more.")
    decoder = Decoder(shape_of(config))
    if is_tied(checkpoint):
        decoder.lm_head.weight = decoder.model.embed_tokens.weight
    wanted = {name: value.shape for name, value in decoder.state_dict().items()}
    found = {name: value for name, value in weights.items() if not name.endswith("rotary_emb.inv_freq")}
    if is_tied(checkpoint):
        found[_HEAD] = found.get(_EMBEDDING, found.get(_HEAD, Tensor()))
    wrong = [name for name in {*wanted, *found} if name not in found or wanted.get(name) != found[name].shape]
    if wrong:
        named = ", ".join(sorted(wrong)[:4])
        raise UserError(
            f"{folder} is no plain Llama model: its weights {named} are missing, other or too many."
        )
    decoder.load_state_dict({name: value.float() for name, value in found.items()})
    return decoder.train()


def weights_of(decoder: Decoder, checkpoint: LlamaCheckpoint) -> dict[str, Tensor]:
    """The decoder's weights under the names and in the dtypes of the checkpoint."""
    own = decoder.state_dict()
    return {
        name: own[name].detach().to("cpu", value.dtype).contiguous() if name in own else value
        for name, value in checkpoint.weights.items()
        if not (name == _HEAD and is_tied(checkpoint))
    }


def is_tied(checkpoint: LlamaCheckpoint) -> bool:
    """Whether the head is the embedding."""
    return bool(checkpoint.config.get("tie_word_embeddings")) or _HEAD not in checkpoint.weights

"""The tokenizer that a GGUF file holds, as a `tokenizers` tokenizer: byte-level BPE, or SentencePiece BPE.

The file names its pre-tokenizer, and the pattern behind the name is known here (llama.cpp has the same list). A
name that is not known is refused, because another pattern would give other ids for some texts. Free of torch.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from ssd_serve.base.errors import CheckpointError
from ssd_serve.models.config import Json
from ssd_serve.models.text.sentencepiece_bpe import Pieces, build
from ssd_serve.models.weights.formats import TokenizerParts
from ssd_serve.models.weights.gguf.config import end_tokens

_KEY = "tokenizer.ggml."
_UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 2, 3, 4, 5, 6

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _gpt2(*before: Any) -> Any:
    return pre_tokenizers.Sequence(
        [*before, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )


def _split(pattern: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _pre_tokenizer(name: str) -> Any:
    """Return the pre-tokenizer of this name. Raises `CheckpointError`."""
    match name:
        case "gpt-2" | "default" | "mpt" | "olmo" | "jais":
            return _gpt2()
        case "smollm" | "starcoder" | "refact" | "command-r":
            return _gpt2(pre_tokenizers.Digits(individual_digits=True))
        case "llama-bpe" | "llama3" | "llama-v3" | "smaug-bpe" | "dbrx":
            return _split(_LLAMA3)
        case "qwen2" | "deepseek-r1-qwen" | "hunyuan" | "megrez":
            return _split(_QWEN2)
        case "tekken":
            return _split(_TEKKEN)
        case _:
            raise CheckpointError(
                f"the GGUF file's pre-tokenizer {name!r} is not known; known are smollm, llama-bpe, qwen2, tekken, "
                "gpt-2 and their aliases. Use the model's safetensors"
            )


_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "smaug-bpe", "tekken")
"""Pre-tokenizers of vocabularies in which a whole word is one token, whatever the merges say."""
_BEGINS = ("llama-bpe", "llama3", "llama-v3", "tekken")
"""Pre-tokenizers that put the BOS token before a text unless the file says otherwise."""


def tokenizer_of(metadata: Json) -> TokenizerParts:
    """Return the tokenizer, the named special tokens and the chat template. Raises `CheckpointError`."""
    tokens: list[str] = metadata.get(f"{_KEY}tokens") or []
    types: list[int] = metadata.get(f"{_KEY}token_type") or [1] * len(tokens)
    if not tokens or len(types) != len(tokens):
        raise CheckpointError(f"the GGUF file has {len(tokens)} tokens and {len(types)} types of tokens")
    special = {
        f"{name}_token": tokens[index]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if isinstance(index := metadata.get(f"{_KEY}{key}_token_id"), int) and index < len(tokens)
    }
    match model := metadata.get(f"{_KEY}model"):
        case "gpt2":
            backend = _byte_level(metadata, tokens, types, special)
        case "llama":
            backend = _sentencepiece(metadata, tokens, types, special)
        case _:
            raise CheckpointError(
                f"the GGUF tokenizer {model!r} is not built; built are gpt2 (BPE) and llama"
            )
    template = metadata.get("tokenizer.chat_template")
    return TokenizerParts(backend, special, template, end_tokens(metadata))


def _byte_level(
    metadata: Json, tokens: Sequence[str], types: Sequence[int], special: Mapping[str, str]
) -> Tokenizer:
    name = str(metadata.get(f"{_KEY}pre", "default"))
    pre_tokenizer = _pre_tokenizer(name)
    merges = [tuple(each.split(" ", 1)) for each in metadata.get(f"{_KEY}merges") or []]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise CheckpointError(f"the GGUF file has {len(tokens) - len(vocabulary)} tokens twice")
    try:
        model = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=name in _WHOLE_WORDS)
    except Exception as error:  # the library raises bare exceptions
        raise CheckpointError(f"the GGUF file's merges do not fit its tokens: {error}") from error
    backend = Tokenizer(model)
    if name in ("qwen2", "deepseek-r1-qwen"):
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizer
    backend.decoder = decoders.ByteLevel()
    for kind, is_special in ((_CONTROL, True), (_USER, False)):
        added = [token for token, found in zip(tokens, types, strict=True) if found == kind]
        backend.add_tokens([AddedToken(each, normalized=False, special=is_special) for each in added])
    before = _wanted(metadata, "add_bos_token", name in _BEGINS, special.get("bos_token"))
    after = _wanted(metadata, "add_eos_token", False, special.get("eos_token"))
    if before or after:
        backend.post_processor = TemplateProcessing(
            single=[*before, "$A", *after],
            special_tokens=[(each, vocabulary[each]) for each in dict.fromkeys(before + after)],
        )
    return backend


def _wanted(metadata: Json, key: str, default: bool, token: str | None) -> list[str]:
    return [token] if token is not None and metadata.get(f"{_KEY}{key}", default) else []


def _sentencepiece(
    metadata: Json, tokens: Sequence[str], types: Sequence[int], special: Mapping[str, str]
) -> Tokenizer:
    scores: list[float] = metadata.get(f"{_KEY}scores") or []
    if len(scores) != len(tokens):
        raise CheckpointError(f"the GGUF file has {len(tokens)} tokens and {len(scores)} scores")
    of_type = {kind: {i for i, found in enumerate(types) if found == kind} for kind in range(1, 7)}
    if not of_type[_UNKNOWN]:
        raise CheckpointError("the GGUF file's vocabulary has no token for what is unknown")
    pieces = Pieces(
        tokens,
        scores,
        of_type[_BYTE],
        of_type[_CONTROL],
        of_type[_UNUSED],
        of_type[_USER],
        min(of_type[_UNKNOWN]),
    )
    return build(
        pieces,
        before=_wanted(metadata, "add_bos_token", True, special.get("bos_token")),
        after=_wanted(metadata, "add_eos_token", False, special.get("eos_token")),
        prefix=bool(metadata.get(f"{_KEY}add_space_prefix", True)),
    )

"""The tokenizer that a GGUF file holds, as a `tokenizers` tokenizer: byte-level BPE, or SentencePiece BPE.

The file names its pre-tokenizer, and the pattern behind the name is known here (llama.cpp has the same list). A
name that is not known is refused, because another pattern would give other ids for some texts. Free of torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class _PreTokenizer:
    """Rules of one name. `pattern` None: GPT-2's, with single digits apart where `digits`."""

    pattern: str | None = None
    digits: bool = False
    composed: bool = False
    """True: text is brought into NFC first."""
    whole_words: bool = False
    """True: a word of the vocabulary is one token, whatever the merges give."""
    begins: bool = False
    """True: the BOS token comes before a text unless the file has `add_bos_token`."""

    def build(self) -> Any:
        """Return the steps of the `tokenizers` library."""
        if self.pattern is not None:
            split = pre_tokenizers.Split(Regex(self.pattern), behavior="isolated")
            return pre_tokenizers.Sequence(
                [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
            )
        digits = [pre_tokenizers.Digits(individual_digits=True)] if self.digits else []
        return pre_tokenizers.Sequence(
            [*digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
        )


_PRE_TOKENIZERS = {
    "gpt-2": _PreTokenizer(),
    "smollm": _PreTokenizer(digits=True),
    "llama-bpe": _PreTokenizer(_LLAMA3, whole_words=True, begins=True),
    "qwen2": _PreTokenizer(_QWEN2, composed=True),
    "tekken": _PreTokenizer(_TEKKEN, whole_words=True, begins=True),
}


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
    return TokenizerParts(backend, special, _chat_templates(metadata), end_tokens(metadata))


def _chat_templates(metadata: Json) -> dict[str, str]:
    """Return the templates by name: `tokenizer.chat_template` and `tokenizer.chat_template.NAME`."""
    key = "tokenizer.chat_template"
    return {
        name.removeprefix(key).lstrip(".") or "default": str(template)
        for name, template in metadata.items()
        if name == key or name.startswith(f"{key}.")
    }


def _byte_level(
    metadata: Json, tokens: Sequence[str], types: Sequence[int], special: Mapping[str, str]
) -> Tokenizer:
    name = metadata.get(f"{_KEY}pre")
    if (rules := _PRE_TOKENIZERS.get(str(name))) is None:
        raise CheckpointError(
            f"the GGUF file's pre-tokenizer {name!r} is not built; built are {', '.join(_PRE_TOKENIZERS)}. "
            "Use the model's safetensors"
        )
    merges = [tuple(each.split(" ", 1)) for each in metadata.get(f"{_KEY}merges") or []]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise CheckpointError(f"the GGUF file has {len(tokens) - len(vocabulary)} tokens twice")
    try:
        model = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=rules.whole_words)
    except Exception as error:  # the library raises bare exceptions
        raise CheckpointError(f"the GGUF file's merges do not fit its tokens: {error}") from error
    backend = Tokenizer(model)
    if rules.composed:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = rules.build()
    backend.decoder = decoders.ByteLevel()
    for kind, is_special in ((_CONTROL, True), (_USER, False)):
        added = [token for token, found in zip(tokens, types, strict=True) if found == kind]
        backend.add_tokens([AddedToken(each, normalized=False, special=is_special) for each in added])
    before = _wanted(metadata, "add_bos_token", rules.begins, special.get("bos_token"))
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

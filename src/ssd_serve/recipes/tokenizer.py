"""The embedded pair's tokenizer: byte-level BPE with its chat template, in Hugging Face layout.

Knows the text of the training files only. The pair is a small base model of Python code, so the chat template
renders messages as what it knows: comments, followed by code.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from ssd_serve.base.errors import UserError

END_OF_TEXT = "<|endoftext|>"
"""Begins every document, and therefore also ends the one before: both bos and eos."""

CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- if message.content is string -%}
{%- set text = message.content -%}
{%- else -%}
{%- set parts = namespace(text='') -%}
{%- for part in message.content or [] -%}
{%- if part.type == 'text' -%}{%- set parts.text = parts.text + part.text -%}{%- endif -%}
{%- endfor -%}
{%- set text = parts.text -%}
{%- endif -%}
{%- if message.role == 'assistant' -%}
{{- text.rstrip() + '\\n\\n' -}}
{%- else -%}
{%- for line in text.strip().split('\\n') -%}
{{- ('# ' + line).rstrip() + '\\n' -}}
{%- endfor -%}
{%- endif -%}
{%- endfor -%}
"""


def train_tokenizer(texts: Iterable[str], entries: int) -> Tokenizer:
    """A byte-level BPE of `entries` tokens, if the texts have enough merges; id 0 is `END_OF_TEXT`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=entries,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A",
        pair=f"{END_OF_TEXT} $A {END_OF_TEXT} $B",
        special_tokens=[(END_OF_TEXT, 0)],
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, context: int) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` (with the chat template) into `folder`."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "add_bos_token": True,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer saved in `folder`."""
    path = folder / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no other type
        raise UserError(f"{path} is not a tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer

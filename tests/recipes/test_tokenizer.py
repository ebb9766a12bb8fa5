"""The tokenizer: lossless, with its beginning-of-text token and chat template."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from ssd_serve.recipes.tokenizer import END_OF_TEXT, load_tokenizer, save_tokenizer, train_tokenizer

transformers = pytest.importorskip("transformers")
TEXTS = ["def f(x):\n    return x\n", "for name in names:\n\tprint(name, 'é', '日本')\n"] * 5


@pytest.fixture
def tokenizer() -> Tokenizer:
    """Trained on two lines."""
    return train_tokenizer(TEXTS, 280)


def test_round_trip(tokenizer: Tokenizer) -> None:
    for text in [*TEXTS, "unseen ☃ \U0001f600\x00\r\n  \t x", ""]:
        ids = tokenizer.encode(text).ids
        assert ids[0] == 0
        assert tokenizer.decode(ids) == text


def test_size_and_special_token(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == 280
    assert tokenizer.token_to_id(END_OF_TEXT) == 0
    assert tokenizer.encode(END_OF_TEXT, add_special_tokens=False).ids == [0]


def test_transformers_reads_it_and_renders_chats(tokenizer: Tokenizer, tmp_path: Path) -> None:
    save_tokenizer(tokenizer, tmp_path, context=64)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert loaded("def f").input_ids == load_tokenizer(tmp_path).encode("def f").ids
    assert (loaded.bos_token, loaded.eos_token) == (END_OF_TEXT, END_OF_TEXT)
    messages = [
        {"role": "system", "content": "Write Python."},
        {"role": "user", "content": "Sort a list.\n\nBe short."},
        {"role": "assistant", "content": "def sort(x):\n    return sorted(x)\n"},
        {"role": "user", "content": [{"type": "text", "text": "Now "}, {"type": "text", "text": "reverse."}]},
    ]
    text = loaded.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        END_OF_TEXT + "# Write Python.\n# Sort a list.\n#\n# Be short.\n"
        "def sort(x):\n    return sorted(x)\n\n# Now reverse.\n"
    )

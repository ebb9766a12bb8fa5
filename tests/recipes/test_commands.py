"""The command line of the recipes."""

import argparse
from pathlib import Path

import pytest

from ssd_serve.base.errors import UserError
from ssd_serve.recipes.commands import add_commands


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_commands(parser)
    return parser.parse_args(words)


@pytest.mark.parametrize(
    "words", [("eagle3", "a", "--layers", "0"), ("distil", "a", "b", "c", "d"), ("ballast", "a", "b")]
)
def test_every_recipe_has_a_function(words: tuple[str, ...]) -> None:
    assert callable(parse(*words).run)


@pytest.mark.parametrize("wrong", ["0", "-1", "many"])
def test_number_of_tokens_must_be_positive(wrong: str) -> None:
    with pytest.raises(SystemExit):
        parse("distil", "a", "b", "c", "--tokens", wrong)


def test_missing_checkpoint_is_explained(tmp_path: Path) -> None:
    args = parse("ballast", str(tmp_path), str(tmp_path / "out"))
    with pytest.raises(UserError, match=r"config\.json"):
        args.run(args)

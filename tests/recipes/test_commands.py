"""The command line of the recipes."""

import argparse
import json
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


@pytest.mark.slow
@pytest.mark.parametrize("family", ["eagle3", "dflash", "medusa", "hydra", "gumiho"])
def test_command_trains_and_exports(family: str, target: Path, library: Path, tmp_path: Path) -> None:
    sizes = ("--tokens", "1", "--rows", "1", "--length", "48", "--proposed", "50", "--no-compile")
    folders = ("--work", str(tmp_path / "work"), "--head", str(tmp_path / "head"), "--text", str(library))
    layers = ("--layers", "0", "1") if family in ("eagle3", "dflash") else ()
    args = parse(family, str(target), *sizes, *folders, *layers)
    assert args.run(args) == 0
    assert (tmp_path / "head" / "model.safetensors").is_file()
    history = json.loads((tmp_path / "head" / "training.json").read_text())
    depths = {"eagle3": 4, "dflash": 7, "medusa": 4, "hydra": 4, "gumiho": 7}[family]
    assert f"agreement_{depths - 1}" in history[-1]
    assert f"agreement_{depths}" not in history[-1]

"""Which installed packages may be trained on."""

from importlib.metadata import Distribution, PathDistribution
from pathlib import Path

import pytest

from ssd_serve.recipes.corpus import SourceFile, added_files, split_corpus
from ssd_serve.recipes.packages import permissive_licence, permissive_packages


def declared(folder: Path, *lines: str) -> Distribution:
    path = folder / "thing-1.0.dist-info"
    path.mkdir()
    (path / "METADATA").write_text(
        "\n".join(["Metadata-Version: 2.4", "Name: thing", "Version: 1.0", *lines])
    )
    return PathDistribution(path)


@pytest.mark.parametrize(
    ("lines", "licence"),
    [
        (["License-Expression: MIT"], "MIT"),
        (["License-Expression: Apache-2.0 OR BSD-2-Clause"], "Apache-2.0 OR BSD-2-Clause"),
        (
            ["License-Expression: Apache-2.0 WITH LLVM-exception AND MIT"],
            "Apache-2.0 WITH LLVM-exception AND MIT",
        ),
        (["Classifier: License :: OSI Approved :: BSD License"], "BSD-3-Clause"),
        (["Classifier: License :: OSI Approved", "License: Apache 2.0"], "Apache-2.0"),
        (["License: MIT"], "MIT"),
        (["License-Expression: MPL-2.0"], None),
        (["License-Expression: MIT AND GPL-3.0-only"], None),
        (
            [
                "Classifier: License :: OSI Approved :: MIT License",
                "Classifier: License :: OSI Approved :: GNU General Public License (GPL)",
            ],
            None,
        ),
        (["License: see the file"], None),
        ([], None),
    ],
)
def test_a_licence_is_permissive_only_where_all_of_it_is_known_to_be(
    lines: list[str], licence: str | None, tmp_path: Path
) -> None:
    assert permissive_licence(declared(tmp_path, *lines)) == licence


@pytest.mark.slow
def test_packages_have_their_licences_and_none_of_others_files() -> None:
    packages = {package.name: package for package in permissive_packages()}
    assert packages["numpy"].licence.startswith("BSD-3-Clause")
    assert "hypothesis" not in packages, "MPL"
    assert "ssd-serve" not in packages
    paths = [file.path for package in packages.values() for file in package.files]
    assert len(paths) == len(set(paths)) > 1000
    assert not [path for path in paths if "_vendor" in path.split("/")]


def test_what_is_added_is_near_nothing_held_out_and_comes_once() -> None:
    def text(name: str, lines: int = 30) -> str:
        return "".join(f"{name}_{line} = {line}\n" for line in range(lines))

    corpus = split_corpus([SourceFile(f"{index}.py", text(f"m{index}")) for index in range(50)], 0.05)
    held_out, train = corpus.held_out[0], corpus.train[0]
    given = [
        SourceFile("p/near.py", held_out.text + "end = 1\n"),
        SourceFile("p/known.py", train.text + "end = 1\n"),
        SourceFile("p/own.py", text("own")),
        SourceFile("q/own.py", text("own") + "end = 1\n"),
        SourceFile("q/half.py", text("own", 10) + text("other", 30)),
    ]
    assert [file.path for file in added_files(corpus, given)] == ["p/own.py", "q/half.py"]

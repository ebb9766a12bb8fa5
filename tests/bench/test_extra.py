"""What `ssd bench` needs of the extra `bench`: named where it is missing, and asked for by nothing else."""

import subprocess
import sys
from pathlib import Path

import pytest

from ssd_serve.base.errors import UserError
from ssd_serve.bench import extra

ROOT = Path(__file__).parents[2]
WITHOUT = """
import sys
sys.modules.update(dict.fromkeys(("httpx", "scipy", "matplotlib", "gguf")))
from ssd_serve.app.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def test_a_package_that_is_missing_is_told_with_its_extra() -> None:
    extra.need("ssd bench load", "numpy", "torch")
    with pytest.raises(
        UserError, match=r"ssd bench load needs no_such and nor_this: pip install 'ssd-serve\[bench\]'"
    ):
        extra.need("ssd bench load", "numpy", "no_such", "nor_this")


@pytest.mark.parametrize(
    "words",
    [
        ["report", "bench/results/modes.json"],
        ["lossless", "--help"],
    ],
    ids=" ".join,
)
def test_results_are_shown_without_the_extra(words: list[str]) -> None:
    command = [sys.executable, "-c", WITHOUT, "bench", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout

"""What a pair is worth: what counts as a function of a first request."""

import pytest

from lab.pair.experiment import is_function


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def f(path):\n    return 1\n", True),
        ("def f(path):\n    return 1\n\n\ndef g(", True),
        ("def f(path):\n    with open(path) as file:\n        return file.rea", True),
        ("def f(path):\n    x = 1\n    return open(pa", True),
        ("def f(path):\n", False),
        ("def f(path):\n#####\n#####\n", False),
        ("def f(path):\nimport os\nimport os\n", False),
        ("def f(path):\n    return = 1\n    pass\n", False),
    ],
)
def test_a_function_is_whole_or_cut_off_within_a_line(text: str, expected: bool) -> None:
    assert is_function(text) is expected

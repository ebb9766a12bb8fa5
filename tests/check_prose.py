"""Language check of docstrings and documents: `python tests/check_prose.py [--check] [--list N] [PATH ...]`.

Prints three measures. With `--check` the exit status is 1 where one is above its limit.
"""

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

NO_SUBJECT = re.compile(
    r"""(what|who|whom|whose|whoever|whatever|whether|which|that|those|these|it|its|they|one|somebody|nobody|
    everybody|anybody|of|how|where|when|until|unless|as|so|nothing|everything|some|by|from|to|in|with|at|without|
    beside|all|if)\b""",
    re.IGNORECASE | re.VERBOSE,
)
"""First words that leave a docstring without a subject."""
UNUSUAL = re.compile(
    r"""\b(who|whom|whose|whoever|whatever|somebody|nobody|everybody|anybody|tells|told|hears?|heard|says|said|
    anew|beside|crowd|guest|doorman|doorkeeper|voice|wish|wishes|crew|seat|houses?|rooms?|newcomer|stranger|lest|
    likewise|amid|thrice|hired|begun)\b""",
    re.IGNORECASE | re.VERBOSE,
)
"""Words that the documentation of comparable projects does not use."""
MAX_WORDS = 30
PATHS = ["src", "tests", "docs", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"]


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Docstrings (also of attributes) of Python, lines of Markdown, each with its line number."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield from enumerate(source.splitlines(), 1)
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for child in node.body:
                value = child.value if isinstance(child, ast.Expr) else None
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    yield child.lineno, value.value.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="*", default=PATHS)
    parser.add_argument("--check", action="store_true", help="fail where a measure is above its limit")
    parser.add_argument(
        "--list", type=int, default=0, metavar="N", help="print the first N findings of each kind"
    )
    options = parser.parse_args()
    files = [
        file for path in map(Path, options.paths) for file in ([path] if path.is_file() else path.rglob("*"))
    ]
    words = docstrings = 0
    no_subject, unusual, long = list[str](), list[str](), list[str]()
    for file in sorted(each for each in files if each.suffix in (".py", ".md")):
        for line, text in texts(file):
            words += len(re.findall(r"[A-Za-z']+", text))
            unusual += [f"{file}:{line}: {found}" for found in UNUSUAL.findall(text)]
            if file.suffix == ".py":
                docstrings += 1
                where = f"{file}:{line}: {text[:90]!r}"
                no_subject += [where] * bool(NO_SUBJECT.match(text))
                sentences = re.split(r"(?<=[.!?])\s+", text)
                long += [where] * any(len(each.split()) > MAX_WORDS for each in sentences)
    share, rate = 100 * len(no_subject) / max(1, docstrings), 1e4 * len(unusual) / max(1, words)
    print(f"docstrings without a subject: {len(no_subject)} of {docstrings} ({share:.1f} %; at most 2 %)")
    print(f"unusual words: {len(unusual)} ({rate:.1f} in 10,000; at most 10)")
    print(f"docstrings with a sentence of more than {MAX_WORDS} words: {len(long)} (at most 0)")
    print("\n".join(each for found in (no_subject, unusual, long) for each in found[: options.list]))
    return int(options.check and (share > 2 or rate > 10 or bool(long)))


if __name__ == "__main__":
    sys.exit(main())

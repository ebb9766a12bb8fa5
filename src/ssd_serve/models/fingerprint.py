"""A short digest that tells one checkpoint from another, without reading all of its weights.

Knows files by name and size; nothing of what is in them.
"""

import hashlib
from pathlib import Path

_ENDS_BYTES = 1 << 20


def fingerprint(folder: Path) -> str:
    """16 hexadecimal digits, from `config.json` and the names, sizes and both ends of the weights' files."""
    digest = hashlib.sha256()
    config = folder / "config.json"
    if config.is_file():
        digest.update(config.read_bytes())
    for path in sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")]):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            digest.update(file.read(_ENDS_BYTES))
            file.seek(max(0, size - _ENDS_BYTES))
            digest.update(file.read())
    return digest.hexdigest()[:16]

"""The packages of the extra `bench`: named before a long measurement, not by a traceback after it."""

from importlib.util import find_spec

from ssd_serve.base.errors import UserError


def need(command: str, *packages: str) -> None:
    """Raises `UserError` where one of the packages is missing."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise UserError(f"{command} needs {' and '.join(missing)}: pip install 'ssd-serve[bench]'")

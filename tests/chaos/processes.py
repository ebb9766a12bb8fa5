"""The processes of a running server, by their titles."""

import contextlib

import psutil  # type: ignore[import-untyped]

_TITLE = "ssd: "


def by_name(server: psutil.Process) -> dict[str, psutil.Process]:
    """Those that live now: `server`, `verifier`, `drafter-0`."""
    found: dict[str, psutil.Process] = {"server": server}
    with contextlib.suppress(psutil.Error):
        for child in server.children(recursive=True):
            with contextlib.suppress(psutil.Error, IndexError):
                title = str(child.cmdline()[0]).strip()
                if title.startswith(_TITLE):  # one that has just begun has no title yet
                    found[title.removeprefix(_TITLE)] = child
    return found

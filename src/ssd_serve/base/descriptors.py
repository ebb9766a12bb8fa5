"""How many files and sockets this process may have open at once."""

import contextlib
import resource


def descriptor_limit() -> int:
    """The limit in force."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def raise_descriptor_limit() -> tuple[int, int]:
    """Raise the limit as far as this user may; the limit before and now. Each connection takes one."""
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # some systems call endless what they do not grant
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return before, descriptor_limit()

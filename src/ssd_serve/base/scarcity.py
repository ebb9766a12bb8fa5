"""What runs out and comes back: descriptors, memory, processes. Whoever meets that waits and tries again.

Knows error numbers only.
"""

import errno

PAUSE_S = 0.2
"""Until whoever listens tries again: a waiting peer would wake it up all the time."""
_SCARCE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN})


def is_scarce(error: OSError) -> bool:
    """Whether it says that something has run out, and nothing else is wrong."""
    return error.errno in _SCARCE

"""Python's own memory management in processes that must not pause."""

import gc

_YOUNG = 20_000
"""New objects between two collections: they take a millisecond or two then."""


def settle_memory() -> None:
    """After loading: collect once, and never look at what lives now again.

    A full collection walks every object that torch and the models made, 100 ms and more in the middle of a
    round; afterwards only what requests leave behind is looked at, about once in ten full rounds: most of it
    is freed without a collection.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG)

"""Python's own memory management in processes that must not pause."""

import gc


def settle_memory() -> None:
    """After loading: collect once, and never look at what lives now again.

    A full collection walks every object that torch and the models made, 100 ms and more in the middle of a
    round; afterwards only what requests leave behind is looked at.
    """
    gc.collect()
    gc.freeze()

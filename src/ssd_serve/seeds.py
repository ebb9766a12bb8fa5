"""Mixing of 64-bit integers: node names and the seeds of a request's choices. Knows no arrays and no tensors."""

_MASK = 0xFFFFFFFFFFFFFFFF


def mix(a: int, b: int) -> int:
    """Combine two 64-bit integers into one, order mattering (splitmix64's finaliser over a sum).

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
    """
    z = (a + 0x9E3779B97F4A7C15 * ((b & _MASK) + 1)) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def choice_seed(seed: int, choice: int) -> int:
    """Seed of choice `choice` of a request with n > 1; choice 0 keeps the request's own seed."""
    return seed if choice == 0 else mix(seed & _MASK, choice)


def root_name(request: int, epoch: int, position: int) -> int:
    """Name of the first root of (request, epoch): the committed token at absolute `position`."""
    return mix(mix(request, epoch), position)

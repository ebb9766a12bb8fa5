"""The 64-bit mixing function behind node names and seeds.

Plain integers without torch or numpy, so that every process can import it. Array versions must agree bit for
bit.
"""

import secrets

MASK64 = 0xFFFF_FFFF_FFFF_FFFF
GOLDEN = 0x9E37_79B9_7F4A_7C15
"""2^64 / golden ratio, odd: the increment of splitmix64."""


def mix(a: int, b: int) -> int:
    """Combine two 64-bit integers into one, order mattering: output `b` of a splitmix64 in state `a`.

    It is a bijection in each argument, so siblings never share a name.
    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
    """
    z = (a + GOLDEN * (b + 1)) & MASK64
    z = ((z ^ (z >> 30)) * 0xBF58_476D_1CE4_E5B9) & MASK64
    z = ((z ^ (z >> 27)) * 0x94D0_49BB_1331_11EB) & MASK64
    return z ^ (z >> 31)


def choice_seed(seed: int, choice: int) -> int:
    """Seed of choice `choice` of a request with n > 1; choice 0 keeps the request's own seed."""
    return seed & MASK64 if choice == 0 else mix(seed, choice)


def root_name(request: int, epoch: int, position: int) -> int:
    """Name of the first root of (request, epoch): the committed token at absolute `position`."""
    return mix(mix(request, epoch), position)


def random_seed() -> int:
    """An unpredictable seed below 2^63, so that every JSON reader with signed integers can hold it."""
    return secrets.randbits(63)

"""Bits and names of draft sources: as many as there is room for, whoever comes."""

from ssd_serve.verifier.drafters.admission import OTHERS
from ssd_serve.verifier.drafters.admission import OTHERS_BIT, SourceBits


def named(bits: SourceBits, bit: int) -> str:
    return bits.names[bit.bit_length() - 1]


def test_a_source_keeps_its_bit_and_its_name() -> None:
    bits = SourceBits()
    one, two = bits.bit("one"), bits.bit("two", remote=True)
    assert (named(bits, one), named(bits, two)) == ("one", "two")
    assert (bits.bit("one", remote=True), bits.bit("two")) == (one, two)
    assert one & two == 0
    assert named(bits, bits.bit("")) == "unnamed"


def test_strangers_never_take_all_the_room() -> None:
    bits = SourceBits()
    theirs = {bits.bit(f"stranger {number}", remote=True) for number in range(1000)}
    assert OTHERS_BIT in theirs
    assert named(bits, OTHERS_BIT) == OTHERS
    assert named(bits, bits.bit("own")) == "own"
    ours = [bits.bit(f"own {number}") for number in range(1000)]
    assert len(bits.names) == 17
    assert ours[-1] == OTHERS_BIT

"""A keyed permutation of the numbers 0 … n-1, of which each is computed alone: no list of them is made.

The rounds are a Feistel network's (Luby and Rackoff, "How to Construct Pseudorandom Permutations from Pseudorandom
Functions", SIAM Journal on Computing 17, 1988). Two ways to permute any number of values are of Black and Rogaway,
"Ciphers with Arbitrary Finite Domains", CT-RSA 2002. The halves of a number are its column and row in a rectangle of
hardly more than n places. A number that leaves 0 … n-1 goes through the rounds again until it is back: cycle walking.
The rounds mix by SplitMix64 (Steele, Lea and Flood, OOPSLA 2014). They look like chance, and keep no secret.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

# Even, so that the halves end where they were. With 8, neighbours of permutations of 64 are not quite by chance.
_ROUNDS, _ROUNDS_OF_FEW, _FEW = 8, 24, 1000


def permuted(positions: NDArray[np.int64], size: int, keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    """What stands at ``positions`` (n,) of permutations of 0 … size-1.

    Args:
        positions: in [0, size).
        size: of the permutation, up to 2⁶³.
        keys: (rounds, n), a column of :func:`round_keys` for each position; or (rounds, 1), one for all.
    """
    keys = np.broadcast_to(keys, (len(keys), len(positions)))[: _ROUNDS if size > _FEW else _ROUNDS_OF_FEW]
    found = _through_rounds(positions.astype(np.uint64), size, keys)
    outside = np.flatnonzero(found >= size)
    while len(outside):
        found[outside] = _through_rounds(found[outside], size, keys[:, outside])
        outside = outside[found[outside] >= size]
    return found.astype(np.int64)


def round_keys(key: Sequence[int]) -> NDArray[np.uint64]:
    """The keys of a permutation's rounds, by the permutation's own: whole numbers from 0 on."""
    return np.random.SeedSequence(key).generate_state(_ROUNDS_OF_FEW, np.uint64).astype(np.uint64)  # for its type alone


def mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hash each of ``values`` to another number of 64 bits, no two to the same, by SplitMix64."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values ^= values >> np.uint64(30)
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values


def _through_rounds(values: NDArray[np.uint64], size: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Permute the places of a rectangle that has at least ``size`` of them, and less than a row more."""
    side = math.isqrt(size - 1) + 1
    width, height, half = np.uint64(side), np.uint64(-(-size // side)), np.uint64(32)
    right, left = np.divmod(values, width)
    for key in keys:
        left += (mixed(right ^ key) >> half) * width >> half  # by a number below the width
        np.minimum(left, left - width, out=left)  # modulo the width: unsigned, a difference below 0 is huge
        left, right, width, height = right, left, height, width
    return left + right * width

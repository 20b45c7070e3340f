"""Fixed permutations: the same on every machine and with every numpy."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray


def fixed_permutation(n: int, name: str) -> NDArray[np.int64]:
    """A permutation of ``range(n)`` that depends on ``n`` and ``name`` only.

    The sort order of the first ``n`` raw outputs of PCG64 seeded with the first 8 bytes (little-endian) of
    blake2b(name). numpy promises the raw stream of a bit generator for good, ``Generator.permutation`` not.
    """
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    keys = np.random.PCG64(seed).random_raw(n)
    return np.argsort(keys, kind="stable").astype(np.int64)

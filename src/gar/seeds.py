"""Random streams that depend on what they are for, never on what was drawn before.

Every stream of a run (weights, data order, dropout) is seeded from the run's seed and its own purpose. What a
method computes in between can then not shift another stream, and a resumed run needs no generator state.
"""

from __future__ import annotations

import hashlib


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from a run seed and the names of a purpose.

    >>> derive_seed(0, "order", "rte", 3) == derive_seed(0, "order", "rte", 3)
    True
    """
    text = "\0".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1

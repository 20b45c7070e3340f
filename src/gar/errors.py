"""Mistakes of the user, told apart from faults of ours.

A :class:`UserError` becomes one line on stderr and exit code 2; anything else keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["UserError"]


class UserError(ValueError):
    """The user's input is wrong; the message is one line that says what, where and what was expected."""


def nearest(name: object, known: Iterable[object]) -> str:
    """The known name closest to ``name`` as a sentence part, or ``""`` when none is close.

    >>> nearest("basline", ["baseline", "gar"])
    "; did you mean 'baseline'?"
    >>> nearest("zzz", ["baseline", "gar"])
    ''
    """
    match = difflib.get_close_matches(str(name).lower(), [str(k) for k in known], n=1, cutoff=0.5)
    return f"; did you mean {match[0]!r}?" if match else ""


def one_of(what: str, name: object, known: Iterable[object]) -> UserError:
    """An error for a name that is none of the known ones, with the nearest of them."""
    names = [str(k) for k in known]
    shown = ", ".join(names) if len(names) <= 24 else ", ".join(names[:24]) + ", …"
    return UserError(f"{what}: unknown name {str(name)!r}; expected one of {shown}{nearest(name, names)}")

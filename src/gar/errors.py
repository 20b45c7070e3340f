"""Mistakes of the user, told apart from faults of ours.

A :class:`UserError` becomes one line on stderr and exit code 2; anything else keeps its traceback.
"""

from __future__ import annotations

import difflib
import errno
import os
import stat
import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

LONGEST_NAME = 100  # characters

__all__ = ["UserError"]


class UserError(ValueError):
    """The user's input is wrong; the message is one line that says what, where and what was expected.

    >>> str(UserError("no file 'a\\nb'"))
    "no file 'a\\\\nb'"
    """

    def __init__(self, message: object) -> None:
        super().__init__("".join(_visible(c) if unwritable(c) else c for c in str(message)))


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


def shown(value: object) -> str:
    """A value in a message: its start, and its type.

    >>> shown(0.5)
    '0.5 (float)'
    """
    return f"{short(value)} ({type(value).__name__})"


def short(value: object) -> str:
    """The start of a value's ``repr``."""
    text = repr(value)
    return text if len(text) <= 40 else text[:39] + "…"


# ---------------------------------------------------------------------- names


def unwritable(text: str) -> str | None:
    """The first control character, line separator or lone surrogate of a text, by its code point, if any.

    Such characters break tables, file names, module names and the one line of a message.

    >>> unwritable("zwölf ✓"), unwritable("a\\tb")
    (None, 'U+0009')
    """
    if text.isprintable():  # fast, and stricter
        return None
    found = next((c for c in text if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp")), None)
    return None if found is None else f"U+{ord(found):04X}"


def name_problem(name: str) -> str | None:
    """What keeps a name of a task or a mixture from being one, or None.

    Names become columns, keys, parts of module names and of paths.

    >>> name_problem("mood"), name_problem(" ")
    (None, 'is blank; expected a name')
    """
    if not name.strip():
        return "is blank; expected a name"
    if name != name.strip():
        return "begins or ends with a blank; expected a name without"
    if (found := unwritable(name)) is not None:
        return f"holds the control character or surrogate {found}; expected printable characters"
    if len(name) > LONGEST_NAME:
        return f"has {len(name)} characters; expected {LONGEST_NAME} at most"
    return None


def _visible(character: str) -> str:
    return character.encode("unicode_escape").decode()


# ---------------------------------------------------------------------- paths


def user_path(path: str | Path) -> Path:
    """A path that the user gave, with ``~`` expanded; what no system accepts as a path is refused."""
    try:
        os.fsencode(path)
        if "\0" in str(path):
            raise ValueError("a NUL character")
        return Path(path).expanduser()
    except ValueError:
        raise UserError(f"{path}: not a path (it holds a NUL character or a lone surrogate)") from None
    except RuntimeError:
        raise UserError(f"{path}: there is no user of that name; expected a path") from None


def real_path(path: str | Path) -> Path:
    """The absolute path without symbolic links; the file need not exist."""
    with path_errors(path):
        try:
            return user_path(path).resolve()
        except RuntimeError:  # pathlib's own word for a loop before Python 3.13
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP)) from None


def path_kind(path: str | Path) -> str:
    """``"file"``, ``"directory"``, ``"missing"``, or what else a path leads to (``"named pipe"``).

    Loops of symbolic links, names that are too long and forbidden places are refused.
    """
    with path_errors(path):
        try:
            mode = user_path(path).stat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            return "missing"
    if stat.S_ISDIR(mode):
        return "directory"
    if stat.S_ISREG(mode):
        return "file"
    return "named pipe" if stat.S_ISFIFO(mode) else "socket" if stat.S_ISSOCK(mode) else "device"


@contextmanager
def path_errors(path: str | Path) -> Iterator[None]:
    """What the system says about a user's path, as a :class:`UserError`; put nothing else inside."""
    try:
        yield
    except OSError as error:
        reason = "symbolic links form a loop" if error.errno == errno.ELOOP else error.strerror or str(error)
        reason = reason[:1].lower() + reason[1:]
        raise UserError(f"{path}: {reason}; expected a path that can be read") from None

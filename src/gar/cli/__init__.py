"""The ``gar`` command: one file a verb, no logic of its own."""

from gar.cli.app import main

__all__ = ["main"]

"""Why training cannot go on."""

from __future__ import annotations


class TrainingFailure(RuntimeError):
    """Training cannot go on (something is not finite); the last good checkpoint stays.

    ``update`` is the update, counted from 1, in which it happened.
    """

    def __init__(self, message: str, update: int) -> None:
        super().__init__(message, update)
        self.update = update

    def __str__(self) -> str:
        return f"update {self.update}: {self.args[0]}"


class OutOfMemory(TrainingFailure):
    """An update does not fit the device's memory; the last checkpoint stays."""

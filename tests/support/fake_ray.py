"""As much of ray as the executor uses, in this process: a task runs when it is waited for."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any


class RayError(Exception):
    pass


ERRORS = (
    "RayActorError",
    "TaskCancelledError",
    "WorkerCrashedError",
    "NodeDiedError",
    "LocalRayletDiedError",
    "ObjectLostError",
    "OutOfMemoryError",
)


class NodeLost(BaseException):
    """Ends a task as the loss of its node does: nothing of it comes back."""


class Reference:
    def __init__(self, compute: Callable[[], Any]) -> None:
        self.compute, self.done = compute, False
        self.value: Any = None
        self.error: Exception | None = None


class FakeRay(ModuleType):
    """Put it into ``sys.modules["ray"]``.

    ``lose`` says after how many checkpoints an attempt ``(job, number of those before it)`` loses its node,
    ``interrupt`` after how many it gets Ctrl-C.
    """

    def __init__(self) -> None:
        super().__init__("ray")
        self.lose: dict[tuple[str, int], int] = {}
        self.interrupt: dict[tuple[str, int], int] = {}
        self.checkpoints: Counter[tuple[str, int]] = Counter()
        self.submitted: list[tuple[Any, ...]] = []
        self.options: list[dict[str, Any]] = []
        self.exceptions = SimpleNamespace(
            RayError=RayError, **{name: type(name, (RayError,), {}) for name in ERRORS}
        )
        affinity = SimpleNamespace(NodeAffinitySchedulingStrategy=lambda node, soft: (node, soft))
        self.util = SimpleNamespace(scheduling_strategies=affinity)

    def is_initialized(self) -> bool:
        return True

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: "here")

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 2.0}

    def remote(self, what: Any) -> Any:
        def make(*arguments: Any) -> Any:
            if isinstance(what, type):
                return _Actor(self, what(*arguments))
            self.submitted.append(arguments)
            return Reference(lambda: what(*arguments))

        def options(**given: Any) -> Any:
            self.options.append(given)
            return SimpleNamespace(remote=make)

        return SimpleNamespace(remote=make, options=options)

    def wait(self, references: list[Reference], num_returns: int, timeout: float) -> Any:
        first, *others = references
        if not first.done:
            first.done = True
            try:
                first.value = first.compute()
            except NodeLost:
                first.error = self.exceptions.NodeDiedError("its node died")
            except Exception as error:
                first.error = error
        return [first], others

    def get(self, reference: Reference) -> Any:
        if reference.error is not None:
            raise reference.error
        return reference.value

    def cancel(self, reference: Reference, force: bool) -> None:
        if not reference.done:
            reference.done, reference.error = True, self.exceptions.TaskCancelledError()

    def kill(self, actor: Any) -> None:
        pass


class _Actor:
    def __init__(self, ray: FakeRay, actor: Any) -> None:
        self._ray, self._actor = ray, actor

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Reference:
            reference = Reference(lambda: None)
            reference.done, reference.value = True, getattr(self._actor, name)(*arguments)
            if name == "tell" and arguments[1]["kind"] == "checkpoint":
                self._arrived(arguments[0])
            return reference

        return SimpleNamespace(remote=call)

    def _arrived(self, key: tuple[str, int]) -> None:
        self._ray.checkpoints[key] += 1
        if self._ray.lose.get(key) == self._ray.checkpoints[key]:
            raise NodeLost
        if self._ray.interrupt.get(key) == self._ray.checkpoints[key]:
            os.kill(os.getpid(), signal.SIGINT)

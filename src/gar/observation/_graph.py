"""Where in an autograd graph what all rows share becomes what each row has of its own."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from gar.observation._grouping import Grouping

#: A node of an autograd graph; torch's own class hides what is read here.
Node = Any


@dataclass(frozen=True)
class Cut:
    """An operation that copies a shared tensor to all rows, seen from the shared side.

    Position ``index`` among the inputs of ``node``. Its output's gradient still knows the rows, its input's
    does no longer; the whole way from there down to the parameters has no rows.
    """

    node: Node
    index: int

    @property
    def below(self) -> GradientEdge:
        """The shared tensor."""
        return GradientEdge(*self.node.next_functions[self.index])

    def reduce(self, grad: Tensor, grouping: Grouping) -> Tensor:
        """The shared tensor's gradient of every group, [M, *shape], from the gradient of the copies."""
        (inner, dtype), outer = _metadata(self.node, self.index), tuple(grad.shape)
        grad = grad.unflatten(0, (grouping.rows, -1)) if self.node.name() == "RepeatBackward0" else grad
        found = grouping.gather(grad).sum(1, dtype=torch.promote_types(grad.dtype, torch.float32))
        if found.dim() == len(outer):  # outer [B, ...] lost its first axis; broadcast axes are summed
            wide = (1,) * (len(outer) - len(inner)) + inner
            axes = [i for i in range(1, len(outer)) if wide[i] == 1 and outer[i] != 1]
            found = found.sum(axes) if axes else found
        return found.reshape(len(found), *inner).to(dtype)


class Graph:
    """The operations behind a tensor; kept only as long as it is searched."""

    def __init__(self, root: Node) -> None:
        self.root = root
        self._consumers: dict[Node, list[tuple[Node, int]]] = defaultdict(list)
        seen, waiting = {root}, [root]
        while waiting:
            node = waiting.pop()
            for index, (inner, _) in enumerate(node.next_functions):
                if inner is not None:
                    self._consumers[inner].append((node, index))
                    if inner not in seen:
                        seen.add(inner)
                        waiting.append(inner)

    def cuts(self, source: Node, rows: int) -> list[Cut] | None:
        """What copies the source's output to ``rows`` rows; None where a way to the root has no such place.

        Empty where the root does not depend on the source.
        """
        found: dict[Cut, None] = {}
        seen, waiting = {source}, [source]
        while waiting:
            node = waiting.pop()
            if node is self.root:
                return None
            for consumer, index in self._consumers.get(node, ()):
                if _copies_to_rows(consumer, index, rows):
                    found[Cut(consumer, index)] = None
                elif consumer not in seen:
                    seen.add(consumer)
                    waiting.append(consumer)
        return list(found)


def _copies_to_rows(node: Node, index: int, rows: int) -> bool:
    name = node.name()
    if name not in ("ExpandBackward0", "RepeatBackward0", "AddBackward0") or rows == 1:
        return False
    if name == "AddBackward0" and index == 1 and node._saved_alpha != 1:
        return False
    outer, inner = tuple(node._input_metadata[0].shape), _metadata(node, index)[0]
    if name == "RepeatBackward0":
        return len(inner) == len(outer) and outer == (rows * inner[0], *inner[1:])
    return outer[:1] == (rows,) and (len(inner) < len(outer) or inner[0] == 1)


def _metadata(node: Node, index: int) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of what enters ``node`` at ``index``."""
    inner, number = node.next_functions[index]
    entry = inner._input_metadata[number]
    return tuple(entry.shape), entry.dtype

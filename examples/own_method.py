"""A method of one's own beside the packaged ones, on texts in memory.

    python examples/own_method.py     # the packaged MiniLM encoder, two made-up tasks, no network

The same class works as a plugin of `gar train` and `gar compare`: put it into a module and name that in the
configuration, `plugins: [my_module]` (docs/add_method.md).
"""

from __future__ import annotations

import random
from typing import ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

import gar
from gar.data import Mixture, Split, Task
from gar.methods import Baseline, Method, Pass, register


@register
class RouterZLoss(Method):
    """Keeps the router's logits small."""

    name: ClassVar[str] = "router_z"
    label: ClassVar[str] = "Router z-loss"
    coefficient: float = Field(1e-2, ge=0)

    @property
    def observes(self) -> frozenset[str]:
        return frozenset({"routing"})

    def terms(self, pass_: Pass) -> Tensor:
        """Added to the task loss before the one backward."""
        logits = [site.routing.logits for site in pass_.sites]
        sizes = torch.stack([z.logsumexp(-1).square().mean() for z in logits])
        return self.coefficient * sizes.sum()


def made_up() -> Mixture:
    """Whether a sentence is about animals, and whether it is a question."""
    draw = random.Random(0)
    words = {1: ("dog", "horse", "sparrow", "whale"), 0: ("table", "engine", "bridge", "spoon")}
    animals, questions = [], []
    for n in range(96):
        noun, end = draw.choice(words[n % 2]), "?" if n // 2 % 2 else "."
        text = f"is the {noun} old{end}" if end == "?" else f"the {noun} is old{end}"
        animals.append((text, n % 2))
        questions.append((text, n // 2 % 2))

    def task(name: str, labels: tuple[str, str], rows: list[tuple[str, int]]) -> Task:
        def split(part: list[tuple[str, int]]) -> Split:
            return Split([text for text, _ in part], np.array([label for _, label in part]))

        return Task(name, labels, split(rows[:64]), validation=split(rows[64:]))

    tasks = task("animal", ("no", "yes"), animals), task("question", ("no", "yes"), questions)
    return Mixture("made_up", tasks, batch_size=16, group_size=8)


def main() -> None:
    mixture = made_up()
    for method in (Baseline(), RouterZLoss(coefficient=1e-2)):
        model = gar.MultiTaskModel.from_pretrained(
            "minilm", tasks=mixture.tasks, experts={"count": 4, "top_k": 2}
        )
        result = gar.train(model, mixture, method, updates=10)
        accuracy, routing = result["accuracy"]["macro"], result["routing"]
        print(f"{method.label:14} accuracy {accuracy:.3f}, load variance {routing['load_variance']:.5f}")


if __name__ == "__main__":
    main()

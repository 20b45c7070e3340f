"""Compare methods on files from Python: what `gar compare own.yaml` does, and its numbers as objects.

    python examples/compare.py      # two made-up tasks as CSV files, the packaged MiniLM, no network
    python examples/compare.py own.yaml

Runs go to `runs/example-compare`; started again, finished ones are not run again.
"""

from __future__ import annotations

import csv
import random
import sys
from pathlib import Path

import gar
from gar.comparison import compare

OUT = Path("runs/example-compare")


def made_up(folder: Path) -> gar.Config:
    """A configuration of two tasks in files: is a sentence about animals, and is it a question?"""
    draw = random.Random(0)
    words = {"yes": ("dog", "horse", "sparrow", "whale"), "no": ("table", "engine", "bridge", "spoon")}
    folder.mkdir(parents=True, exist_ok=True)
    tasks = []
    for name in ("animal", "question"):
        for split, size in (("train", 80), ("validation", 40)):
            with (folder / f"{name}-{split}.csv").open("w", newline="", encoding="utf-8") as file:
                rows = csv.writer(file)
                rows.writerow(["text", "label"])
                for _ in range(size):
                    animal, question = draw.choice(("yes", "no")), draw.choice(("yes", "no"))
                    noun = draw.choice(words[animal])
                    text = f"is the {noun} old?" if question == "yes" else f"the {noun} is old."
                    rows.writerow([text, animal if name == "animal" else question])
        files = {split: str(folder / f"{name}-{split}.csv") for split in ("train", "validation")}
        tasks.append({"name": name, **files})
    return gar.config.build({
        "experts": {"count": 4, "top_k": 2},
        "mixture": {"tasks": tasks, "batch_size": 16, "group_size": 8},
        "optimizer": {"updates": 20, "learning_rate": 1e-3},
    })  # fmt: skip


def main() -> None:
    what = sys.argv[1] if len(sys.argv) > 1 else made_up(OUT / "data")
    found = compare(what, ["baseline", "gar"], seeds=3, out=OUT / "runs")
    for verdict in found.verdicts:
        print(verdict.text)
        if verdict.difference is not None:  # numbers as fractions, paired by seed
            print(verdict.difference)
    print(found.results.frame[["method", "seed", "accuracy", "nmi", "effective_experts"]])
    if found.recommended is not None:
        print(found.recommended.command)


if __name__ == "__main__":  # worker processes import this file
    main()

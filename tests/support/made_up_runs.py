"""Made-up run directories for the tests of results and report."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from gar import metrics
from gar.config import build
from gar.runs.state import State

TASKS = {
    "five": ["qnli", "boolq", "rte", "paws", "wic"],
    "six": ["qnli", "boolq", "rte", "paws", "anli", "cb"],
    "seven_mrpc": ["qnli", "boolq", "rte", "wic", "cola", "sst2", "mrpc"],
}
ENVIRONMENT = {
    "gar": "0.1.0",
    "python": "3.11.2",
    "platform": "Linux",
    "libraries": {"torch": "2.11.0", "transformers": "5.17.0"},
    "device": "cpu",
    "device_name": "a <made-up> processor & more",
    "seed": 0,
    "commit": "0123abc",
}


def sections(tasks: Mapping[str, float], rng: np.random.Generator, experts: int = 8) -> dict[str, Any]:
    """Accuracy and routing as an evaluation gives them; the routing is drawn."""
    by_task = rng.dirichlet(np.full(experts, 2.0), len(tasks))
    load = by_task.mean(0)
    counts = np.rint(1000 * by_task).astype(int)
    norms = rng.uniform(0.1, 1.0, (len(tasks), experts))
    (own,) = rng.spawn(1)
    directions = own.normal(size=(len(tasks), experts, 3))
    gradients = directions * (norms / np.linalg.norm(directions, axis=-1))[..., None]
    return {
        "accuracy": {"macro": float(np.mean(list(tasks.values()))), "tasks": dict(tasks), "extra": {}},
        "routing": {
            "load": load.tolist(),
            "load_variance": metrics.load_variance(load),
            "utilization": metrics.utilization(load),
            "gradient_mass_purity": metrics.gradient_mass_purity(norms),
            "structure_purity": metrics.structure_purity(counts),
            "nmi": metrics.normalized_mutual_information(counts),
            "ari": metrics.adjusted_rand_index(counts),
            "entropy": 1.5,
            "normalized_entropy": 1.5 / np.log(experts),
            "intra_expert_coherence": float(rng.uniform(-0.1, 0.4)),
            "inter_expert_similarity": float(rng.uniform(-0.1, 0.4)),
            "task_cosine": float(rng.uniform(-0.1, 0.4)),
            "observed_cosine": float(rng.uniform(-0.1, 0.4)),
            "task_conflict": float(rng.uniform(0, 0.5)),
            "load_by_task": dict(zip(tasks, by_task.tolist(), strict=True)),
            "counts": dict(zip(tasks, counts.tolist(), strict=True)),
            "gradient_norms": dict(zip(tasks, norms.tolist(), strict=True)),
            "gradient_grams": np.einsum("ted,sed->ets", gradients, gradients).tolist(),
        },
    }


def write_run(
    root: Path,
    method: str,
    seed: int,
    mixture: str = "five",
    *,
    accuracy: float | Mapping[str, float] = 0.6,
    state: str = State.FINISHED,
    tree: Mapping[str, Any] | None = None,
    fields: Mapping[str, Any] | None = None,
    evaluations: tuple[int, ...] = (),
    seconds: float = 0.1,
    name: str | None = None,
) -> Path:
    """One run directory. ``tree`` holds configuration keys, ``fields`` the method's."""
    path = root / (name or f"{mixture}-{method}-{'-'.join(map(str, (fields or {}).values()))}-{seed}")
    path.mkdir(parents=True)
    config = build(
        {
            "mixture": {"name": mixture},
            "method": {"name": method, **(fields or {})},
            **(tree or {}),
            "seed": seed,
        }
    )
    (path / "config.yaml").write_text(yaml.safe_dump(config.to_dict(), allow_unicode=True), encoding="utf-8")
    (path / "environment.json").write_text(json.dumps({**ENVIRONMENT, "seed": seed}), encoding="utf-8")
    rng = np.random.default_rng([seed, len(method), len(mixture)])
    shares = (
        accuracy if isinstance(accuracy, Mapping) else dict.fromkeys(TASKS.get(mixture, ["a", "b"]), accuracy)
    )
    lines = [
        {"update": u, "loss": 1 / u, "tasks": {}, "gradient_norm": 1.0, "learning_rate": 1e-3}
        for u in range(1, 31)
    ]
    lines += [{"update": update, "evaluation": sections(shares, rng)} for update in evaluations]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (path / "history.jsonl").write_text(text + '{"update": 31, "lo', encoding="utf-8")  # cut short
    if state == State.FAILED:
        failure = {"error": "TrainingFailure", "reason": "update 31: the loss of task <b>rte</b> & co is nan"}
        (path / "failure.json").write_text(json.dumps(failure), encoding="utf-8")
    if state == State.FINISHED:
        header = {
            "schema": 1,
            "method": method,
            "mixture": mixture,
            "seed": seed,
            "updates": config.optimizer.updates,
            "majority": dict.fromkeys(shares, 0.5),
        }
        timing = {"updates_per_second": 1 / seconds, "step_seconds_mean": seconds}
        result = {**header, **sections(shares, rng), "timing": timing}
        (path / "result.json").write_text(json.dumps(result), encoding="utf-8")
    return path


def write_sweep(root: Path) -> Path:
    """Two mixtures, seven methods, three seeds with evaluations; a failed, a running and a corrupt run."""
    methods = {
        "baseline": 0.60,
        "cagrad": 0.605,
        "gar": 0.62,
        "stgc": 0.58,
        "loadpen": 0.601,
        "switchaux": 0.6,
    }
    rng = np.random.default_rng(5)
    for mixture in ("six", "seven_mrpc"):
        for method, level in {**methods, "stgc_load": 0.585}.items():
            for seed in (1, 2, 3):
                shares = {task: float(level + rng.normal(0, 0.01)) for task in TASKS[mixture]}
                write_run(
                    root,
                    method,
                    seed,
                    mixture,
                    accuracy=shares,
                    evaluations=(500, 1000, 1500),
                    seconds=0.1 + level / 9,
                )
    write_run(root, "gar", 4, "six", state=State.FAILED)
    write_run(root, "gar", 5, "six", state=State.RUNNING)
    write_run(root, "gar", 6, "six")
    (root / "six-gar--6" / "result.json").write_text('{"schema": 1, "accur', encoding="utf-8")
    return root

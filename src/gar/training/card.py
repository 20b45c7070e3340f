"""The model card written beside a trained model."""

from __future__ import annotations

from typing import Any

from gar.config import Config
from gar.data.task import Mixture
from gar.model.multitask import MultiTaskModel


def model_card(model: MultiTaskModel, config: Config, mixture: Mixture, result: dict[str, Any]) -> str:
    """Markdown: what the model is, what it reached, and how to load it."""
    accuracy, routing = result["accuracy"], result["routing"]
    rows = [
        f"| {task.name} | {', '.join(task.labels)} | {len(task.train)} | {accuracy['tasks'][task.name]:.4f} |"
        for task in mixture.tasks
    ]
    backbone, e = model.config, model.experts_config
    return "\n".join(
        [
            f"# {mixture.name}: multi-task classifier with routed experts",
            "",
            f"Backbone `{backbone.name}` ({'trained' if backbone.trainable else 'frozen'}), "
            f"{e.count} experts at site `{e.site}`, {e.top_k} per unit; method `{config.method.name}`, "
            f"{result['updates']} updates, seed {config.seed}.",
            "",
            "| task | labels | training examples | validation accuracy |",
            "|---|---|---|---|",
            *rows,
            "",
            f"Macro accuracy {accuracy['macro']:.4f}; load variance {routing['load_variance']:.5f}, "
            f"utilization {routing['utilization']:.3f}, "
            f"gradient-mass purity {routing['gradient_mass_purity']:.4f}.",
            "",
            "```python",
            "import gar",
            'model = gar.MultiTaskModel.from_pretrained("path/to/this/directory")',
            f'model.predict("{mixture.tasks[0].name}", ["a text"]'
            + (', ["its pair"]' if len(mixture.tasks[0].text) == 2 else "")
            + ")",
            "```",
            "",
            *(f"{note}\n" for note in mixture.notes),
        ]
    )

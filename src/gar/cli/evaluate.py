"""``gar evaluate``."""

from __future__ import annotations

import json

from rich.console import Console

from gar.cli.common import load_run, result_table
from gar.cli.options import (
    DataDirOption,
    DeviceOption,
    Format,
    FormatOption,
    MixtureOption,
    NoCacheOption,
    RunArgument,
)
from gar.data import majority_shares
from gar.evaluation.measure import evaluate


def evaluate_run(
    run: RunArgument,
    mixture: MixtureOption = None,
    device: DeviceOption = None,
    data_dir: DataDirOption = None,
    no_cache: NoCacheOption = False,
    output: FormatOption = Format.table,
) -> None:
    """Accuracy per task and routing numbers of a saved model on validation data."""
    saved = load_run(run, mixture, device, data_dir, no_cache)
    config = saved.config
    sections = evaluate(saved.model, saved.mixture, options=config.evaluation, cache=config.cache)
    if output == Format.json:
        print(json.dumps(sections, indent=2, ensure_ascii=False))
        return
    shares = majority_shares(saved.mixture)
    Console().print(result_table([{"method": "model", **sections}], shares, saved.mixture.name))

"""``gar bench``."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console

from gar.cli.options import DataDirOption, DeviceOption, option_overrides
from gar.runs.environment import resolve_device

app = typer.Typer(no_args_is_help=True, help="Measure update times on this machine; prints Markdown tables.")
print_line = Console(soft_wrap=True, highlight=False, markup=False).print


@app.command()
def step(
    model: Annotated[
        list[str] | None, typer.Option(help="Architectures; default: minilm and roberta-base.")
    ] = None,
    length: Annotated[int, typer.Option(help="Longest text in tokens (random, from half of it).")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Timed updates per line, after one warm-up.")] = 5,
    device: DeviceOption = None,
) -> None:
    """Update time of Baseline, GAR one_pass and GAR per_group, cached and uncached, as ratios to Baseline."""
    from gar.errors import one_of
    from gar.training.benchmark import ARCHITECTURES, machine, step_table

    names = model or ["minilm", "facebookai/roberta-base"]
    for name in names:
        if name.lower() not in ARCHITECTURES:
            raise one_of("--model", name, ARCHITECTURES)
    where = resolve_device(device or "auto")
    facts = ", ".join(f"{key} {value}" for key, value in machine(where).items())
    print_line(
        f"Five tasks, batches of 32, groups of 8, up to {length} tokens; {repeats} updates a line. {facts}.\n"
    )
    print_line("| model | features | method | ms per update (fastest to slowest) | ratio to Baseline |")
    print_line("|---|---|---|---|---|")
    for name, kind, timings in step_table(names, where, length, repeats):
        for timing in timings:
            ratio = timing.seconds / timings[0].seconds
            spread = f"{timing.seconds * 1e3:.1f} ({timing.fastest * 1e3:.1f} to {timing.slowest * 1e3:.1f})"
            print_line(f"| {name} | {kind} | {timing.name} | {spread} | {ratio:.2f} |")


@app.command()
def presets(
    pattern: Annotated[str, typer.Argument(help="Which presets, e.g. 'paper/roberta_head/*'.")] = "paper/*",
    repeats: Annotated[int, typer.Option(min=1, help="Timed updates per preset.")] = 1,
    warmup: Annotated[int, typer.Option(min=0, help="Updates before them.")] = 1,
    device: DeviceOption = None,
) -> None:
    """One update of every preset at full model size with random weights: finite, step time, peak memory."""
    import fnmatch
    import gc

    import torch

    from gar.data.load import resolve
    from gar.presets.catalogue import find, names
    from gar.training.benchmark import machine, one_update

    where = resolve_device(device or "auto")
    print_line(", ".join(f"{key} {value}" for key, value in machine(where).items()) + "\n")
    print_line("| preset | seconds per update | peak GiB | finite |")
    print_line("|---|---|---|---|")
    kept: dict[object, Any] = {}
    for name in fnmatch.filter(names(), pattern):
        config = find(name).config()
        classes = [len(entry.labels or ()) or 2 for entry in resolve(config.mixture)[1]]
        # Experts that replace the FFN change the backbone; all others can share one.
        key = (config.backbone, config.experts.site) if config.experts.site != "full_ffn" else name
        if key not in kept:
            kept.clear()
        timing, kept[key] = one_update(config, classes, where, repeats, warmup, kept.get(key))
        peak = "" if timing.peak_gib is None else f"{timing.peak_gib:.2f}"
        print_line(f"| {name} | {timing.seconds:.3f} | {peak} | {'yes' if timing.finite else 'NO'} |")
        gc.collect()
        if where.type == "cuda":
            torch.cuda.empty_cache()


@app.command()
def methods(
    mixture: Annotated[str, typer.Argument(help="A YAML file, mixture or task.")],
    backbone: Annotated[str, typer.Option(help="Hub id, directory or minilm.")] = "minilm",
    updates: Annotated[int, typer.Option(min=2, help="Length of each run.")] = 20,
    data_dir: DataDirOption = None,
    device: DeviceOption = None,
) -> None:
    """A short real run of every site, gate and method: first and last loss, step time, peak memory."""
    from gar.data import load_mixture
    from gar.presets.catalogue import resolve_config
    from gar.training.benchmark import every_combination, machine

    config = resolve_config(mixture, option_overrides(data_dir=data_dir))
    data = load_mixture(config.mixture, data_dir=config.data_dir, cache_dir=config.cache.directory)
    where = resolve_device(device or "auto")
    facts = ", ".join(f"{key} {value}" for key, value in machine(where).items())
    print_line(f"{backbone} on {data.name}, {updates} updates. {facts}.\n")
    print_line("| site | top-k | method | loss, first to last update | ms per update | peak GiB |")
    print_line("|---|---|---|---|---|---|")
    for line in every_combination(data, backbone, where, updates):
        if line.losses is None or line.seconds is None:
            print_line(f"| {line.site} | {line.top_k} | {line.method} | {line.note} | | |")
            continue
        peak = "" if line.peak_gib is None else f"{line.peak_gib:.2f}"
        change = f"{line.losses[0]:.4f} to {line.losses[1]:.4f}"
        print_line(
            f"| {line.site} | {line.top_k} | {line.method} | {change} | {line.seconds * 1e3:.1f} | {peak} |"
        )

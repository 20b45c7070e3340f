"""What rows of examples and tokens cost GAR beside rows of groups: random weights, random tokens."""

from __future__ import annotations

import time
from statistics import median
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from gar.benchmark.report import machine_line
from gar.benchmark.settings import Bench, Setting
from gar.cli.options import DeviceOption
from gar.methods import PassSite
from gar.runs.environment import resolve_device
from gar.training import Updater

#: What is compared, each by its keys; Baseline is the reference.
ROWS: dict[str, dict[str, Any]] = {
    "groups": {},
    "examples": {"observation.unit": "example"},
    "64 examples": {"observation.unit": "example", "observation.rows": 64},
    "256 tokens": {"observation.unit": "token", "observation.rows": 256},
    "1024 tokens": {"observation.unit": "token", "observation.rows": 1024},
    "all tokens": {"observation.unit": "token"},
}


def main(
    model: Annotated[str, typer.Option(help="Architecture; see gar bench step.")] = "minilm",
    site: Annotated[str, typer.Option(help="lora_ffn or full_ffn.")] = "lora_ffn",
    length: Annotated[int, typer.Option(help="Longest text in tokens.")] = 64,
    repeats: Annotated[int, typer.Option(help="Updates a line, after one that is not timed.")] = 5,
    device: DeviceOption = None,
) -> None:
    """What rows of examples and tokens cost GAR beside rows of groups: random weights and tokens.

    All lines take turns. On a CPU times are those of the processor, which others on the machine change less
    than what a clock shows.
    """
    where = resolve_device(device or "auto")
    setting = Setting(model, site, "cached", length=length)
    bench = Bench(setting, where, 1 + len(ROWS))
    configs = {"Baseline": setting.config("baseline")}
    configs |= {name: setting.config("gar", changes) for name, changes in ROWS.items()}
    updaters = {
        name: Updater(bench.model, bench.source, config, list(bench.model.tasks))
        for name, config in configs.items()
    }
    kept = {name: memory(updater) for name, updater in updaters.items() if name in ROWS}
    times: dict[str, list[float]] = {name: [] for name in updaters}
    for number in range(repeats):
        for name, updater in updaters.items():
            times[name].append(seconds(updater, number))
    print(f"{model}, {site}, cached, up to {length} tokens. {machine_line(where)}.\n")
    print("| rows | N | ms per update (fastest to slowest) | ratio to Baseline | kept MiB | as [N, d] MiB |")
    print("|---|---|---|---|---|---|")
    for name, own in times.items():
        count, taken, whole = kept.get(name, ("", "", ""))
        shown = [1000 * each for each in (median(own), min(own), max(own))]
        ratio = median(one / other for one, other in zip(own, times["Baseline"], strict=True))
        spread = "{:.0f} ({:.0f} to {:.0f})".format(*shown)
        print(f"| {name} | {count} | {spread} | {ratio:.2f} | {taken} | {whole} |")


def seconds(updater: Updater, number: int) -> float:
    """What an update takes."""
    if updater.model.device.type == "cpu":
        began = time.process_time()
        updater.run(number)
        return time.process_time() - began
    torch.cuda.synchronize()
    began = time.perf_counter()
    updater.run(number)
    torch.cuda.synchronize()
    return time.perf_counter() - began


def memory(updater: Updater) -> tuple[str, str, str]:
    """How many rows, what is kept of them with their Gram matrix, and what they would take, in MiB.

    It is the update that is not timed.
    """
    update = updater.gradients(updater.schedule.groups(0), 0)
    parts = [part for each in update.passes for part in each.sites]
    count = len(update.row_tasks)
    size = sum(shape.numel() for shape in updater.model.bank.experts.template().values())
    taken = sum(tensor.nbytes for part in parts for tensor in tensors(part)) + 4 * count**2
    return str(count), f"{taken / 2**20:.1f}", f"{4 * count * size / 2**20:.1f}"


def tensors(part: PassSite) -> list[Tensor]:
    """What is kept of a pass for its rows."""
    if part.finer is None:
        return [] if part.rows is None else [part.rows]
    return [side for pair in part.finer.factors.values() for side in pair if side is not None]


if __name__ == "__main__":
    typer.run(main)

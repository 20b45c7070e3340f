"""Update time on several ranks of one machine, a GPU each: random weights, random tokens."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from gar.benchmark.report import machine_line
from gar.benchmark.settings import Bench, Setting
from gar.cli.app import several_ranks
from gar.cli.options import DeviceOption, Overrides
from gar.config import parse_overrides
from gar.distributed import Job, device_of_rank, joined, launch
from gar.errors import UserError
from gar.runs.environment import resolve_device
from gar.training import Updater, checkpoint
from gar.training.captured_backbone import updates_of

WARMUP = 4


def main(
    overrides: Overrides = None,
    model: Annotated[str, typer.Option(help="Architecture; see gar bench step.")] = "deberta-v3-base",
    site: Annotated[str, typer.Option(help="lora_ffn, full_ffn or lora_head.")] = "full_ffn",
    features: Annotated[str, typer.Option(help="cached, uncached or trained.")] = "trained",
    method: Annotated[str, typer.Option(help="One of gar bench step's methods.")] = "gar",
    precision: Annotated[str, typer.Option(help="float32, tf32 or bfloat16.")] = "tf32",
    length: Annotated[int, typer.Option(help="Longest text in tokens.")] = 128,
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, one after the other.")] = "1,2,4",
    updates: Annotated[int, typer.Option(min=1, help="Updates of a stretch.")] = 5,
    repeats: Annotated[int, typer.Option(min=1, help="Stretches.")] = 5,
    device: DeviceOption = None,
    out: Annotated[Path | None, typer.Option(help="A JSON file for all numbers.")] = None,
    profile: Annotated[
        Path | None, typer.Option(help="Where a stretch's time goes on the first rank, below this folder.")
    ] = None,
    part: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Update time, bytes exchanged and scaling on 1, 2, 4, … ranks."""
    setting = Setting(
        model, site, features, precision, length=length, overrides=parse_overrides(overrides or ())
    )
    if part is not None:
        with joined() as job:
            found = measured(setting, method, job, device or "auto", updates, repeats, profile)
            if job.is_first:
                part.write_text(json.dumps(found), encoding="utf-8")
        return
    if several_ranks():
        raise UserError("benchmarks/ranks.py starts the ranks itself; expected no launcher, and --ranks")
    where = resolve_device(device or "auto")
    lines: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        for count in map(int, ranks.split(",")):
            result = Path(directory) / f"{count}.json"
            if launch([sys.executable, *sys.argv, "--part", str(result)], count):
                raise SystemExit(f"{count} ranks failed")
            lines.append({"ranks": count, **json.loads(result.read_text(encoding="utf-8"))})
    labels = {**setting.labels, "method": method, "length": length, **setting.overrides}
    machine = machine_line(where)
    print(", ".join(f"{key} {value}" for key, value in labels.items()) + f". {machine}.\n")
    print(
        "| ranks | ms per update | lowest to highest | times as fast | MB sent per rank, update | peak GiB | "
        "graphs |"
    )
    print("|---|---|---|---|---|---|---|")
    for line in lines:
        line["speedup"] = lines[0]["ms"] / line["ms"]
        print(
            f"| {line['ranks']} | {line['ms']:.1f} | {line['lowest']:.1f} to {line['highest']:.1f} | "
            f"{line['speedup']:.2f} | {line['bytes'] / 1e6:.1f} | {line['peak_gib']:.1f} | "
            f"{line['captured']} |"
        )
    if out is not None:
        out.write_text(
            json.dumps({"setting": labels, "machine": machine, "lines": lines}, indent=2) + "\n",
            encoding="utf-8",
        )


def measured(
    setting: Setting,
    method: str,
    job: Job,
    device: str,
    updates: int,
    repeats: int,
    profile: Path | None = None,
) -> dict[str, float | bool]:
    """Milliseconds per update over stretches that all ranks begin together, of a run's own loop."""
    where = job.each(lambda: resolve_device(device_of_rank(device, job)))
    job.use(where)
    bench = Bench(setting, where, 1)
    updater = Updater(
        bench.model.train(), bench.source, setting.config(method), list(bench.model.tasks), job=job
    )
    checkpoint.align(job, bench.model, updater.optimizer, updater.state)
    loop = updates_of(updater)
    done = 0

    def advance(count: int) -> float:
        nonlocal done
        job.any(False)
        began = time.perf_counter()
        while count:
            step = min(count, loop.stride)
            for _ in loop.block(done, done + step):
                pass
            done, count = done + step, count - step
        if where.type == "cuda":
            torch.cuda.synchronize(where)
        job.any(False)
        return time.perf_counter() - began

    stretch = max(updates, loop.stride)
    advance(max(WARMUP, 2 * loop.stride))
    sent = updater.sent
    times = [1e3 * advance(stretch) / stretch for _ in range(repeats)]
    told = {
        "ms": statistics.median(times),
        "lowest": min(times),
        "highest": max(times),
        "bytes": (updater.sent - sent) / (repeats * stretch),
        "peak_gib": torch.cuda.max_memory_allocated(where) / 2**30 if where.type == "cuda" else 0.0,
        "same_bits": job.differing(updater.parameters) is None,
        "captured": 0 if isinstance(loop, Updater) else loop.captured,
    }
    if profile is not None:
        with torch.profiler.profile(record_shapes=True) as seen:
            advance(stretch)
        if job.is_first:
            profile.mkdir(parents=True, exist_ok=True)
            seen.export_chrome_trace(str(profile / f"{job.count}.json"))
            order = "self_cuda_time_total" if where.type == "cuda" else "self_cpu_time_total"
            table = seen.key_averages().table(sort_by=order, row_limit=60)
            (profile / f"{job.count}.txt").write_text(table, encoding="utf-8")
    return told


if __name__ == "__main__":
    typer.run(main)

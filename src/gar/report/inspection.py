"""The page of ``gar inspect``: the layers of a model in a table, over depth, and their load by group."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from gar.report._html import html
from gar.report._page import Block, Page, Picture, Said, Section
from gar.report._style import INK, Panels, title
from gar.report._table import Cell, Row, Table
from gar.report._write import markdown_page, write_files
from gar.report.figures import heatmaps

NAME = "inspect"
#: Characters of a group's name beside a figure.
LONGEST = 20
#: What is compared with shuffled labels: key in result.json, heading, what its values mean.
COMPARED = (
    ("nmi", "NMI", "0: the expert says nothing about the group"),
    ("purity_above_floor", "purity above floor", "0: all experts have one mix of the groups' gradients"),
    ("cancelled_energy", "conflict", "share of the gradient's energy that cancels inside the experts"),
)
CHANCE = (
    "In brackets: the middle 95 % of the same number with the groups' labels shuffled over units of texts. "
    "* marks values above shuffled labels at the 5 % level, over all layers together."
)
_COLORS = {"nmi": "#0072b2", "purity_above_floor": "#009e73", "cancelled_energy": "#d55e00"}

Result = Mapping[str, Any]


def write_inspection(result: Result, out: str | Path) -> dict[str, Path]:
    """inspect.html, inspect.md and the figures, in a directory; returns the files by name.

    ``result`` is the content of an inspection's result.json.
    """
    page = inspection_page(result)
    contents = {
        f"{NAME}.html": html(page),
        f"{NAME}.md": markdown_page(page),
        **{f"figures/{picture.name}.svg": picture.svg + "\n" for picture in page.pictures},
    }
    return write_files(Path(out), contents)


def inspection_page(result: Result) -> Page:
    """Everything that the page shows."""
    dead = [
        f"{layer_title(layer)}: {len(layer['dead'])} of {layer['experts']} experts never selected "
        f"({', '.join(map(str, layer['dead']))})"
        for layer in result["layers"]
        if layer["dead"]
    ]
    one = len(result["groups"]) == 1
    blocks = [
        Block("head-findings", "What the numbers say", [Said([result["verdict"], *result["findings"]])]),
        Block("head-layers", "Layers", [layers_table(result)]),
        Block("head-depth", "Over depth", [_depth(result, one)]),
        Block("head-load", "Load by group and expert", [_loads(result)]),
        Block("head-groups", "Groups", [groups_table(result), *([] if one else [_cosines(result)])]),
        *([Block("head-dead", "Experts without work", [Said(dead)])] if dead else []),
        Block("head-how", "How it was measured", [Said(measured(result))]),
    ]
    name = f"{result['model']} ({result['architecture']})"
    return Page(
        summary=str(result["verdict"]).rstrip("."),
        sections=[Section("inspection", name, blocks, {})],
        problems=Table("problems", "", []),
        collapses=[],
        notes=result["notes"],
        endpoints=pd.DataFrame(),
        compared={},
        title="What the experts do",
    )


def layer_title(layer: Result) -> str:
    """``layer 3``, or the module's path."""
    return str(layer["name"] if layer["layer"] is None else f"layer {layer['layer']}")


def chance_text(chance: Result) -> str:
    """``0.120* [0.010, 0.034]``: the value, whether it is above shuffled labels, and their middle 95 %.

    >>> chance_text({"value": 0.12, "low": 0.01, "high": 0.034, "above": True})
    '0.120* [0.010, 0.034]'
    """
    text = f"{chance['value']:.3f}{'*' if chance['above'] else ''}"
    if chance["low"] is None:
        return text
    return f"{text} [{chance['low']:.3f}, {chance['high']:.3f}]"


def measured(result: Result) -> list[str]:
    """How exact the numbers are, in sentences."""
    texts = sum(group["texts"] for group in result["groups"])
    tokens = sum(group["tokens"] for group in result["groups"])
    gradients = "Gradients are exact."
    if result["dimension"] is not None:
        gradients = (
            f"Gradients are sketches of {result['dimension']} numbers an expert; the relative standard error "
            f"of a squared length is at most {100 * result['relative_error']:.1f} %."
        )
    return [
        f"{texts:,} texts of {tokens:,} tokens, measured in {result['units']} units; labels shuffled "
        f"{result['permutations']} times.",
        gradients,
    ]


def layers_table(result: Result) -> Table:
    """A row a layer, and their means."""
    rows, one = [], len(result["groups"]) == 1
    for layer in result["layers"]:
        experts = f"{layer['experts']}, top {layer['top_k']:.3g}"
        rows.append(_row(layer_title(layer), layer, experts, len(layer["dead"]), one))
    dead = sum(len(layer["dead"]) for layer in result["layers"])
    rows.append(_row("all", result["overall"], "", dead, one, group="all", strong=True))
    notes = [CHANCE] if result["permutations"] else []
    titles = {heading: meaning for _, heading, meaning in COMPARED}
    return Table("layers", "Experts by layer", rows, notes, titles, strong=(0,))


def _row(name: str, numbers: Result, experts: str, dead: int, one: bool, **options: Any) -> Row:
    """``one``: with a single group nothing is told apart, and what compares groups has no value."""
    contents: dict[str, Any] = {
        "layer": name,
        "experts": experts,
        "dead": Cell(str(dead), dead),
        "effective": Cell(f"{numbers['effective_experts']:.3f}", numbers["effective_experts"]),
        "utilization": Cell(f"{numbers['utilization']:.3f}", numbers["utilization"]),
        "load variance": Cell(f"{numbers['load_variance']:.5f}", numbers["load_variance"]),
        "entropy": Cell(f"{numbers['normalized_entropy']:.3f}", numbers["normalized_entropy"]),
    }
    for key, heading, _ in COMPARED:
        contents[heading] = Cell("–") if one else Cell(chance_text(numbers[key]), numbers[key]["value"])
    for key, heading in (("gradient_mass_purity", "gradient-mass purity"), ("ari", "ARI")):
        contents[heading] = Cell("–") if one else Cell(f"{numbers[key]:.3f}", numbers[key])
    coherence = numbers["intra_expert_coherence"]
    contents["coherence in experts"] = Cell(f"{coherence:.3f}", coherence)
    return Row(contents, **options)


def groups_table(result: Result) -> Table:
    """A row a group: how many texts and tokens, and how well the model does on them."""
    rows = []
    for group in result["groups"]:
        contents = {
            "group": str(group["name"]),
            "texts": Cell(f"{group['texts']:,}", group["texts"]),
            "tokens": Cell(f"{group['tokens']:,}", group["tokens"]),
            "loss": Cell(f"{group['loss']:.3f}", group["loss"]),
        }
        if (perplexity := group["perplexity"]) is not None:
            contents["perplexity"] = Cell(f"{perplexity:,.1f}", perplexity)
        rows.append(Row(contents))
    return Table("groups", "Groups of texts", rows)


def _cosines(result: Result) -> Table:
    names = [str(group["name"]) for group in result["groups"]]
    mean = np.mean([layer["cosines"] for layer in result["layers"]], 0)
    rows = [
        Row(
            {
                "group": name,
                **{other: Cell(f"{x:.3f}", float(x)) for other, x in zip(names, row, strict=True)},
            }
        )
        for name, row in zip(names, mean, strict=True)
    ]
    caption = "Cosine between the groups' gradients in all experts of a layer; means over layers"
    return Table("cosines", caption, rows)


def _depth(result: Result, one: bool) -> Picture:
    caption = (
        "Each layer's value (dots, filled where above shuffled labels), and the middle 95 % under shuffled "
        "labels (band; dashed: their mean). Experts in effect: a share of all; entropy: of a text's gates, "
        "divided by log E."
    )
    return Picture("depth", caption, depth(result, [] if one else [key for key, *_ in COMPARED]))


def depth(result: Result, compared: Sequence[str]) -> Figure:
    """A panel a number over the layers in order."""
    layers = result["layers"]
    at = np.arange(len(layers))
    panels = Panels(len(compared) + 1, 4, 2.9, 2.5)
    for axes, key in zip(panels.axes, compared, strict=False):
        color = _COLORS[key]
        found = [layer[key] for layer in layers]
        values = [chance["value"] for chance in found]
        if found[0]["low"] is not None:
            low, high, mean = ([chance[end] for chance in found] for end in ("low", "high", "mean"))
            axes.fill_between(at, low, high, color=INK, alpha=0.15, lw=0)
            axes.plot(at, mean, color=INK, linewidth=0.8, linestyle="--")
        axes.plot(at, values, color=color, linewidth=1.2)
        for x, chance in zip(at, found, strict=True):
            face = color if chance["above"] else "none"
            axes.plot([x], [chance["value"]], "o", color=color, markersize=4, markerfacecolor=face)
        ends = [*values, *(chance[end] or 0 for chance in found for end in ("low", "high"))]
        axes.set_ylim(1.1 * min(0, *ends), 1.1 * max(1e-3, *ends))
        title(axes, next(heading for name, heading, _ in COMPARED if name == key), "layer")
    last = panels.axes[-1]
    for key, label, color, marker in (
        ("effective_experts", "experts in effect", "#0072b2", "o"),
        ("normalized_entropy", "entropy", "#e69f00", "s"),
    ):
        last.plot(at, [layer[key] for layer in layers], marker=marker, color=color, markersize=4, label=label)
    last.set_ylim(0, 1.05)
    last.legend(frameon=False, fontsize=8, labelcolor=INK)
    title(last, "Load", "layer")
    step = math.ceil(len(layers) / 12)
    numbers = [str(n if layer["layer"] is None else layer["layer"]) for n, layer in enumerate(layers)]
    for axes in panels.axes:
        axes.set_xticks(at[::step], numbers[::step])
    return panels.figure


def _loads(result: Result) -> Picture:
    caption = (
        "Share of each group's load by expert; rows sum to 1. In every layer the experts are ordered by the "
        "group that uses them most, and keep their numbers. The line in the colour bar is an even share."
    )
    full = [str(group["name"]) for group in result["groups"]]
    names = [name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…" for name in full]
    if len(set(names)) < len(names):
        names = full
    sizes = list(dict.fromkeys(layer["experts"] for layer in result["layers"]))
    if len(sizes) > 1:
        return Picture("load", caption, None, "the layers have different numbers of experts")
    tables = {layer_title(layer): dict(zip(names, layer["load"], strict=True)) for layer in result["layers"]}
    return Picture("load", caption, heatmaps(tables, 3, "group", least=4))

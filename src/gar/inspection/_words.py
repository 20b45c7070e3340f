"""What an inspection says in sentences, by rules that are written in docs/inspect.md."""

from __future__ import annotations

from collections.abc import Sequence

from gar.inspection._statistics import LEAST_PERMUTATIONS
from gar.inspection.result import Inspection, Layer

#: A layer's load is balanced from this share of experts in effect on, as in a diagnosis, and uneven below
#: the second.
BALANCED, UNEVEN = 0.8, 0.5
#: From this share of a layer's experts on, dead ones are what to look at first.
DEAD = 0.1
#: Numbers, or layers with dead experts, that a sentence lists.
SHOWN = 8
#: NMI below this is little, however sure it is.
LITTLE = 0.05
SHUFFLED = "no higher than for shuffled labels"


def findings(found: Inspection) -> list[str]:
    """Every sentence that the numbers carry, in the order of the rules."""
    dead = sorted(_dead(found), key=lambda layer: -len(layer.dead) / layer.experts)
    said = [
        f"{_experts(layer.dead)} of {layer.title}: never selected (an even share would be "
        f"{layer.even:,.0f} of {layer.selections:,} selections)."
        for layer in dead[:SHOWN]
    ]
    if len(dead) > SHOWN:
        said.append(f"{_where(dead[SHOWN:])}: more experts that were never selected.")
    if few := [layer for layer in found.layers if layer.few_tokens]:
        said.append(f"{_where(few)}: too few tokens to call an expert dead; give more texts.")
    if uneven := [layer for layer in found.layers if layer.effective_experts < UNEVEN]:
        said.append(f"{_where(uneven)}: fewer than half of the experts are in effect.")
    if not found.tells:
        return [*said, _cannot_tell(found)]
    mixed, apart = _mixed(found), [layer for layer in found.layers if layer.nmi.above]
    if mixed:
        said.append(f"{_where(mixed)}: the load is balanced, but groups are mixed (NMI {SHUFFLED}).")
    if apart:
        said.append(
            f"{_where(apart)}: which expert is chosen tells something about the group (NMI "
            f"{_span(apart, 'nmi')}, above shuffled labels)."
        )
    for what, name in (("purity_above_floor", "purity above its floor"), ("cancelled_energy", "conflict")):
        if higher := [layer for layer in found.layers if getattr(layer, what).above]:
            said.append(f"{_where(higher)}: {name} {_span(higher, what)}, beyond shuffled labels.")
        else:
            said.append(f"In no layer {name} beyond that of shuffled labels.")
    return said


def verdict(found: Inspection) -> str:
    """One sentence to act on: the first rule that applies."""
    if found.groups and not found.tells and len(found.groups) == 1:
        return _cannot_tell(found)
    dead = _dead(found)
    if any(len(layer.dead) >= DEAD * layer.experts for layer in dead):
        worst = max(dead, key=lambda layer: len(layer.dead) / layer.experts)
        count, total = sum(len(layer.dead) for layer in dead), sum(layer.experts for layer in found.layers)
        return (
            f"{count} of {total} experts were never selected, most of them in {worst.title} "
            f"({len(worst.dead)} of {worst.experts}): look there first; they do nothing on these texts."
        )
    if uneven := [layer for layer in found.layers if layer.effective_experts < UNEVEN]:
        return f"{_where(uneven)}: few experts do most of the work; a balance loss acts on these."
    if not found.tells:
        return _cannot_tell(found)
    if mixed := _mixed(found):
        cancelling = [layer for layer in mixed if layer.cancelled_energy.above]
        more = ", though the groups' gradients cancel no more than by chance"
        if cancelling:
            where = "there" if cancelling == mixed else f"in {_listed(cancelling)}"
            more = f", and {where} the groups' gradients cancel more than by chance"
        balance, mix = ("balances its", "mixes") if len(mixed) == 1 else ("balance their", "mix")
        act = "it" if len(mixed) == 1 else "these"
        return (
            f"{_where(mixed)} {balance} load but {mix} groups: NMI {SHUFFLED}{more}; training the "
            f"router with GAR acts on {act}."
        )
    if weak := [layer for layer in found.layers if layer.nmi.above and layer.nmi.value < LITTLE]:
        return (
            f"{_where(weak)}: experts tell the groups apart more than by chance, but little (NMI "
            f"below {LITTLE}); training the router with GAR acts on {'it' if len(weak) == 1 else 'these'}."
        )
    if all(layer.nmi.above for layer in found.layers):
        least = min(found.layers, key=lambda layer: layer.nmi.value)
        return (
            f"Experts of every layer tell the groups apart, least in {least.title} (NMI "
            f"{least.nmi.value:.3f}): nothing here asks for a change."
        )
    rest = [layer for layer in found.layers if not layer.nmi.above]
    return (
        f"{_where(rest)}: NMI is {SHUFFLED}, and the load is not even either; look at the load by "
        "group before anything is trained."
    )


def _dead(found: Inspection) -> list[Layer]:
    return [layer for layer in found.layers if layer.dead and not layer.few_tokens]


def _mixed(found: Inspection) -> list[Layer]:
    return [x for x in found.layers if x.effective_experts >= BALANCED and not x.nmi.above]


def _cannot_tell(found: Inspection) -> str:
    if len(found.groups) == 1:
        return (
            "Whether experts specialise cannot be told: there is one group of texts. Name a column of groups "
            "(--group-by), or give one file a group."
        )
    if not found.permutations:
        return "Whether experts specialise cannot be told: labels were not shuffled (--permutations)."
    if found.permutations < LEAST_PERMUTATIONS:
        return (
            f"Whether experts specialise cannot be told: labels were shuffled {found.permutations} times "
            f"(--permutations), and fewer than {LEAST_PERMUTATIONS} leave no p-value below 0.05 within reach."
        )
    return (
        f"Whether experts specialise cannot be told: {found.units} units of texts can be shuffled in too few "
        "ways. Give more texts, or smaller units (--group-size)."
    )


def _span(layers: Sequence[Layer], what: str) -> str:
    values = [getattr(layer, what).value for layer in layers]
    low, high = f"{min(values):.3f}", f"{max(values):.3f}"
    return low if low == high else f"{low} to {high}"


def _where(layers: Sequence[Layer]) -> str:
    """:func:`_listed` at the beginning of a sentence; a module's path stays as it is."""
    text = _listed(layers)
    return text[0].upper() + text[1:] if text.startswith("layer") and "." not in text else text


def _experts(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"Expert {numbers[0]}"
    parts = ranges(numbers)
    if len(parts) > SHOWN:
        return f"{len(numbers)} experts ({', '.join(parts[:SHOWN])}, …)"
    return f"Experts {_and(parts)}"


def _listed(layers: Sequence[Layer]) -> str:
    """``layer 2``, ``layers 0, 3–7 and 9``; by name where they have no number of their own."""
    numbers = [layer.layer for layer in layers]
    if any(n is None for n in numbers) or len(set(numbers)) < len(numbers):
        return _and([layer.name for layer in layers])
    parts = ranges([n for n in numbers if n is not None])
    return f"layer {parts[0]}" if len(layers) == 1 else f"layers {_and(parts)}"


def ranges(numbers: Sequence[int]) -> list[str]:
    """Neighbours joined.

    >>> ranges([0, 3, 4, 5, 7, 8])
    ['0', '3–5', '7', '8']
    """
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return [
        part for run in runs for part in ([f"{run[0]}–{run[-1]}"] if len(run) > 2 else [str(n) for n in run])
    ]


def _and(parts: Sequence[str]) -> str:
    return f"{', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else parts[0]

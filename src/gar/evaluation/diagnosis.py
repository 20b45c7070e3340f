"""What each expert does: all measurements of a model on a mixture, and the tokens or labels it sees most."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from transformers import PreTrainedTokenizerBase

from gar import metrics
from gar.config import CacheConfig, EvaluationConfig
from gar.data import check_mixture, majority_shares
from gar.data.task import Mixture
from gar.evaluation.findings import findings
from gar.evaluation.measure import evaluate
from gar.features import Source, make_source
from gar.model import MultiTaskModel
from gar.routing import Routing

SCHEMA = 1
TOP = 10
#: With k = E/2, a token seen 20 times is chosen every time by chance with probability 1e-6.
MINIMUM_COUNT = 20


@dataclass(frozen=True)
class Lifted:
    """An item that an expert sees more often than chance.

    ``count`` is how often the item occurs, ``chosen`` the share of these occurrences at which the expert is
    among the selected ones, ``lift`` that share over the expert's share of all occurrences.
    """

    item: int
    count: int
    chosen: float
    lift: float


def diagnose(
    model: MultiTaskModel,
    mixture: Mixture,
    *,
    source: Source | None = None,
    options: EvaluationConfig | None = None,
    cache: CacheConfig | None = None,
    top: int = TOP,
    minimum_count: int = MINIMUM_COUNT,
) -> dict[str, Any]:
    """Everything :func:`gar.evaluate` measures, and what each expert sees; the content of diagnostics.json.

    ``seen[e]`` lists up to ``top`` tokens (FFN sites) or tasks and labels (head site) with the highest lift
    of expert e, among those that occur ``minimum_count`` times or more. ``collapse`` says in plain words what
    is wrong with the load, or is None; ``findings`` are sentences about all of it. ``chance.nmi`` is what
    NMI reaches by chance (:func:`gar.metrics.shuffled_information`).
    """
    if top < 0 or minimum_count < 1:
        raise ValueError(f"top must be 0 or more and minimum_count 1 or more, got {top} and {minimum_count}")
    if source is None:
        check_mixture(model.tasks, mixture)
        source = make_source(model, [task.validation for task in mixture.tasks], cache or CacheConfig())
    tally, choices = TALLIES[model.site.unit](model, mixture, source), _Choices()

    def watch(task: int, rows: NDArray[np.int64], routing: Routing) -> None:
        tally(task, rows, routing)
        choices(task, rows, routing)

    sections = evaluate(model, mixture, source=source, options=options, watch=watch)
    chance = {"nmi": choices.shuffled_information()}
    said = findings({**sections, "chance": chance}, majority_shares(mixture))
    return {
        "schema": SCHEMA,
        "mixture": mixture.name,
        "site": model.experts_config.site,
        "experts": model.experts_config.count,
        "top_k": model.experts_config.top_k,
        "unit": model.site.unit,
        "collapse": metrics.describe_collapse(sections["routing"]["load"]),
        "findings": said,
        "chance": chance,
        **sections,
        "minimum_count": minimum_count,
        "seen": tally.seen(top, minimum_count),
    }


def most_lifted(
    occurrences: ArrayLike, selections: ArrayLike, top: int = TOP, minimum_count: int = MINIMUM_COUNT
) -> list[list[Lifted]]:
    """Per expert the items with the highest lift ``P(expert | item) / P(expert)``, highest first.

    ``occurrences`` [I] counts each item, ``selections`` [I, E] how often each expert was selected for it.
    Items seen fewer than ``minimum_count`` times are too rare to judge, those with a lift of 1 or less are
    not seen more than by chance; neither is listed. Ties go to the more frequent item.

    >>> most_lifted([30, 10, 60], [[30, 0], [10, 0], [10, 50]], minimum_count=20)[0]
    [Lifted(item=0, count=30, chosen=1.0, lift=2.0)]
    """
    n, chosen = np.asarray(occurrences, np.int64), np.asarray(selections, np.int64)
    usual = chosen.sum(0) / max(1, n.sum())
    frequent = np.flatnonzero(n >= max(1, minimum_count))
    share = chosen[frequent] / n[frequent, None]
    found = []
    for e in range(chosen.shape[1]):
        lift = share[:, e] / usual[e] if usual[e] else np.zeros(len(frequent))
        order = [i for i in np.lexsort((frequent, -n[frequent], -lift))[:top] if lift[i] > 1 + 1e-9]
        found.append(
            [Lifted(int(frequent[i]), int(n[frequent[i]]), float(share[i, e]), float(lift[i])) for i in order]
        )
    return found


def readable_token(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """A token as a person reads it, whatever the vocabulary's own spelling; ``␣`` is a space.

    Byte-level pieces become text (``Ġcafé``, which a vocabulary spells ``ĠcafÃ©``, becomes ``␣café``), unless
    they are only a part of a character. WordPiece's ``##`` and special tokens stay.
    """
    piece = tokenizer.convert_ids_to_tokens(token)
    if piece is None:
        return f"<{token}>"
    if token in tokenizer.all_special_ids:
        return str(piece)
    text = str(tokenizer.convert_tokens_to_string([piece]))
    if not text or "\N{REPLACEMENT CHARACTER}" in text:
        text = str(piece)
    elif piece.startswith("\N{LOWER ONE EIGHTH BLOCK}") and not text.startswith(" "):
        text = f" {text}"  # a SentencePiece decoder drops the first space
    shown = text.replace(" ", "␣")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in shown)


def collapse_notes(results: Iterable[Mapping[str, Any]]) -> list[str]:
    """What is wrong with the loads of some results in plain words, a line a result that has a problem.

    >>> collapse_notes([{"method": "gar", "routing": {"load": [0.95, 0.05]}}])
    ['gar: expert 0 holds 95.0 % of the load']
    """
    said = ((result["method"], metrics.describe_collapse(result["routing"]["load"])) for result in results)
    return [f"{method}: {words}" for method, words in said if words]


class _Tokens:
    """Counts, for every token of the vocabulary, the experts that its occurrences select."""

    def __init__(self, model: MultiTaskModel, mixture: Mixture, source: Source) -> None:
        self._tokenizer, self._device = model.tokenizer, model.device
        size = 1 + max(int(split.ids.max()) for split in source.splits)
        self._occurrences: NDArray[np.int64] = np.zeros(size, np.int64)
        for split in source.splits:
            self._occurrences += np.bincount(split.ids, minlength=size)
        self._ids = [torch.from_numpy(split.ids).to(model.device).long() for split in source.splits]
        #: Where examples begin.
        self._first = [torch.from_numpy(split.offsets).to(model.device) for split in source.splits]
        shape = (size, model.bank.experts.count)
        self._selections = torch.zeros(shape, dtype=torch.int64, device=model.device)

    def __call__(self, task: int, rows: NDArray[np.int64], routing: Routing) -> None:
        first = self._first[task][torch.from_numpy(rows).to(self._device, non_blocking=True)]
        places = first.unsqueeze(1) + torch.arange(routing.selected.shape[1], device=self._device)
        # Padding reads some other token, for which it selects no expert.
        ids = self._ids[task][places.clamp(max=len(self._ids[task]) - 1)]
        self._selections.index_add_(0, ids.flatten(), routing.selected.flatten(0, 1).long())

    def seen(self, top: int, minimum_count: int) -> list[list[dict[str, Any]]]:
        found = most_lifted(self._occurrences, self._selections.cpu().numpy(), top, minimum_count)
        return [
            [{"token": readable_token(self._tokenizer, x.item), "id": x.item, **_numbers(x)} for x in expert]
            for expert in found
        ]


class _Labels:
    """Counts the experts that the examples of each task, and of each of its labels, select."""

    def __init__(self, model: MultiTaskModel, mixture: Mixture, source: Source) -> None:
        self._labels = source.labels
        self._items: list[tuple[str, str | None]] = []
        self._first: list[int] = []
        occurrences: list[int] = []
        for task in mixture.tasks:
            self._first.append(len(self._items))
            self._items += [(task.name, None), *((task.name, label) for label in task.labels)]
            by_label = np.bincount(task.validation.labels, minlength=len(task.labels)).tolist()
            occurrences += [len(task.validation), *by_label]
        self._occurrences = np.array(occurrences)
        shape = (len(self._items), model.bank.experts.count)
        self._selections = torch.zeros(shape, dtype=torch.int64, device=model.device)

    def __call__(self, task: int, rows: NDArray[np.int64], routing: Routing) -> None:
        chosen, first = routing.selected.long(), self._first[task]
        labels = self._labels[task][torch.from_numpy(rows).to(chosen.device, non_blocking=True)]
        self._selections[first] += chosen.sum(0)
        self._selections.index_add_(0, first + 1 + labels, chosen)

    def seen(self, top: int, minimum_count: int) -> list[list[dict[str, Any]]]:
        # An example counts twice, for its task and its label, which leaves an expert's usual share as it is.
        found = most_lifted(self._occurrences, self._selections.cpu().numpy(), top, minimum_count)
        return [
            [{"task": self._items[x.item][0], "label": self._items[x.item][1], **_numbers(x)} for x in expert]
            for expert in found
        ]


class _Choices:
    """How often each example selects each expert."""

    def __init__(self) -> None:
        self._seen: list[tuple[int, NDArray[np.int64], torch.Tensor]] = []

    def __call__(self, task: int, rows: NDArray[np.int64], routing: Routing) -> None:
        chosen = routing.selected
        self._seen.append((task, rows, chosen.sum(1) if chosen.dim() == 3 else chosen.long()))

    def shuffled_information(self) -> float:
        # By task and example, so that the draws do not depend on how examples went together.
        tasks = np.concatenate([np.full(len(rows), task) for task, rows, _ in self._seen])
        order = np.lexsort((np.concatenate([rows for _, rows, _ in self._seen]), tasks))
        chosen = torch.cat([chosen for *_, chosen in self._seen]).cpu().numpy()
        return metrics.shuffled_information(chosen[order], tasks[order])


#: What is counted, by the routed unit.
TALLIES: dict[str, type[_Tokens] | type[_Labels]] = {"token": _Tokens, "example": _Labels}


def _numbers(lifted: Lifted) -> dict[str, Any]:
    return {"count": lifted.count, "chosen": lifted.chosen, "lift": lifted.lift}


def gradient_shares(norms: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """``routing.gradient_norms`` as each task's share of an expert's gradient mass; 0 where there is none.

    >>> gradient_shares({"a": [3.0, 0.0], "b": [1.0, 0.0]})
    {'a': [0.75, 0.0], 'b': [0.25, 0.0]}
    """
    shares = metrics.gradient_mass_shares(list(norms.values()))
    return dict(zip(norms, shares.tolist(), strict=True))

"""Which BIG-bench tasks the quickstart takes: the rule in ``presets/quickstart.yaml``, applied to all.

It looks at texts, sizes, keywords and a linear probe on the frozen encoder, and at no method of this package.
"""

from __future__ import annotations

import csv
import itertools
import json
import tarfile
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, StratifiedKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from gar.config import BackboneConfig
from gar.data import RegisteredTask, Split, Task, _bigbench, cache_root, encode_lengths, load_task, registry
from gar.data.tokenize import tokenize_split
from gar.errors import UserError
from gar.model import length_bucketed
from gar.model.backbone import load_backbone, load_tokenizer

#: What the rule asks for, and the examples it is measured on.
VALIDATION, TOKENS, MARGIN, FEWEST = 500, 128, 0.05, 4
TRAIN_EXAMPLES, VALIDATION_EXAMPLES = 2000, 1000
STRENGTHS = 10.0 ** np.arange(-5, 3)  # C of the probe
TOKENS_PER_FORWARD = 1024
ROOT = f"{_bigbench.RELEASE}/bigbench/benchmark_tasks/"
#: Keywords of BIG-bench that say how a task is put, and not what skill it asks for.
FORMS = {
    "multiple choice", "free response", "json", "zero-shot", "one-shot", "many-shot", "numerical response",
}  # fmt: skip
#: Other languages, as the folders of translated tasks end.
LANGUAGES = ("de", "es", "fr", "it", "ja", "nl", "pl", "pt", "ru", "zh")


@dataclass(frozen=True)
class Candidate:
    """One task whose form can be read.

    ``train`` and ``validation`` count all examples. ``tokens`` is the mean of the texts of the cut splits,
    special tokens included; ``majority`` and ``probe`` are accuracies on the cut validation split. What
    is not probed has none, and ``verdict`` says why.
    """

    folder: str
    name: str
    skill: str
    classes: int
    train: int
    validation: int
    tokens: float
    majority: float | None = None
    probe: float | None = None
    verdict: str = ""


def main(
    archive: Annotated[
        Path | None, typer.Option(help="bigbench-1.0.0.tar.gz; default: the cache's, else pip fetches it.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Also into a CSV file.")] = None,
) -> None:
    """Apply the quickstart's rule to all tasks of BIG-bench whose form can be read."""
    backbone = BackboneConfig()
    tokenizer, model = load_tokenizer(backbone), load_backbone(backbone).eval()
    found = []
    with tempfile.TemporaryDirectory(prefix="gar-learnable-") as scratch:
        for entry, content in readable(archive or _archive(Path(scratch))):
            found.append(judged(entry, content, tokenizer, model, Path(scratch)))
            print(f"{found[-1].folder}: {found[-1].verdict}", flush=True)
    found = marked(found)
    print("\n" + markdown(found))
    if out is not None:
        with out.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow([field.name for field in fields(Candidate)])
            writer.writerows([_cell(value) for value in vars(candidate).values()] for candidate in found)


def _archive(scratch: Path) -> Path:
    there = cache_root(None) / _bigbench.RELEASE / f"{_bigbench.RELEASE}.tar.gz"
    return there if there.is_file() else _bigbench.download(scratch)


def readable(archive: Path) -> Iterator[tuple[RegisteredTask, dict[str, Any]]]:
    """Every task of the distribution that the reader takes, as a registered task, and what its file holds."""
    registered = {task.bigbench: task for task in registry().tasks.values() if task.bigbench}
    with tarfile.open(archive, "r|gz") as tar:
        for member in tar:
            if not (member.name.startswith(ROOT) and member.name.endswith("/task.json")):
                continue
            folder = member.name.removeprefix(ROOT).removesuffix("/task.json")
            file = tar.extractfile(member)
            assert file is not None
            content: dict[str, Any] = json.load(file)
            if labels := shared_choices(content.get("examples") or []):
                new = RegisteredTask(
                    name=folder.replace("/", "_"), labels=labels, bigbench=folder, drop_empty=True
                )
                yield registered.get(folder, new), content


def shared_choices(examples: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """The choices, if they are the same in all examples and in each one of them is the best; else none."""
    scores: list[Any] = [example.get("target_scores") for example in examples]
    if not scores or not all(isinstance(s, dict) and s for s in scores):
        return ()
    first = scores[0]
    decided = all(list(s.values()).count(max(s.values())) == 1 for s in scores)
    return tuple(first) if decided and all(s.keys() == first.keys() for s in scores) else ()


def judged(
    entry: RegisteredTask,
    content: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    model: PreTrainedModel,
    scratch: Path,
) -> Candidate:
    """The task against the rule, but for the choice among those that meet it."""
    assert entry.bigbench is not None
    file = _bigbench._cached(scratch / _bigbench.RELEASE, entry.bigbench)
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(content), encoding="utf-8")
    keywords = content.get("keywords", [])
    skill = next((word for word in keywords if word not in FORMS), "")
    bare = Candidate(entry.bigbench, entry.name, skill, len(entry.labels), 0, 0, 0.0)
    try:
        whole = load_task(entry, cache_dir=scratch)
        cut = load_task(
            entry,
            cache_dir=scratch,
            max_train_examples=TRAIN_EXAMPLES,
            max_validation_examples=VALIDATION_EXAMPLES,
        )
    except UserError as error:
        return replace(bare, verdict=f"cannot be used: {error}".partition(";")[0])
    finally:
        file.unlink()
    lengths = np.concatenate([encode_lengths(tokenizer, split) for split in (cut.train, cut.validation)])
    measured = replace(
        bare, train=len(whole.train), validation=len(whole.validation), tokens=float(lengths.mean())
    )
    if problem := unfit(measured, keywords):
        return replace(measured, verdict=problem)
    majority = float(np.bincount(cut.validation.labels).max() / len(cut.validation))
    accuracy = probe(cut, tokenizer, model)
    verdict = "met" if accuracy - majority >= MARGIN else "not learnable"
    return replace(measured, majority=majority, probe=accuracy, verdict=verdict)


def unfit(candidate: Candidate, keywords: Iterable[str]) -> str:
    """Why a task is not probed, if so."""
    if "non-language" in keywords:
        return "no language"
    if candidate.folder.endswith(tuple(f"_{language}" for language in LANGUAGES)):
        return "not English"
    if candidate.validation < VALIDATION:
        return f"validation under {VALIDATION}"
    return f"over {TOKENS} tokens" if candidate.tokens > TOKENS else ""


def probe(task: Task, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> float:
    """Validation accuracy of a linear probe; its C is the best of five folds of the training split."""
    train, validation = (pooled(split, tokenizer, model) for split in (task.train, task.validation))
    folds = StratifiedKFold(5, shuffle=True, random_state=0)
    line = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    search = GridSearchCV(line, {"logisticregression__C": STRENGTHS}, cv=folds)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # classes rarer than folds; a large C that has not converged
        search.fit(train, task.train.labels)
    return float(search.score(validation, task.validation.labels))


def pooled(split: Split, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> NDArray[np.float32]:
    """The mean of each text's last hidden states over its tokens, [N, width]."""
    tokens = tokenize_split(tokenizer, split, TOKENS)
    features = np.empty((len(split), model.config.hidden_size), np.float32)
    for rows in length_bucketed(tokens.lengths, TOKENS_PER_FORWARD):
        texts = [torch.from_numpy(tokens.ids[tokens.offsets[i] : tokens.offsets[i + 1]]).long() for i in rows]
        ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(text) for text in texts], batch_first=True)
        with torch.no_grad():
            states = model(input_ids=ids, attention_mask=mask).last_hidden_state
        weights = mask.unsqueeze(2).to(states.dtype)
        features[rows] = ((states * weights).sum(1) / weights.sum(1)).numpy()
    return features


def marked(found: Sequence[Candidate]) -> list[Candidate]:
    """Sorted by skill and tokens; those that the rule chooses among the met ones are ``chosen``.

    The first of every skill, then the second ones and so on, until there are enough.
    """
    ordered = sorted(found, key=lambda candidate: (candidate.skill, candidate.tokens))
    met: dict[str, list[str]] = {}
    for candidate in ordered:
        if candidate.verdict == "met":
            met.setdefault(candidate.skill, []).append(candidate.folder)
    taken: set[str] = set()
    for turn in itertools.zip_longest(*met.values()):
        if len(taken) < FEWEST:
            taken.update(folder for folder in turn if folder is not None)
    return [replace(c, verdict="chosen") if c.folder in taken else c for c in ordered]


def markdown(found: Iterable[Candidate]) -> str:
    """A table of all candidates."""
    names = [field.name for field in fields(Candidate)]
    rows = [names, ["---"] * len(names), *([_cell(value) for value in vars(each).values()] for each in found)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cell(value: object) -> str:
    """Accuracies have three digits, tokens one."""
    if isinstance(value, float):
        return f"{value:.1f}" if value > 1 else f"{value:.3f}"
    return "" if value is None else str(value)


if __name__ == "__main__":
    typer.run(main)

"""Train one model on one mixture, in memory or into a run directory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from safetensors import SafetensorError

from gar.config import Config, MixtureConfig, OptimizerConfig, TaskConfig, explain
from gar.data import Mixture, check_mixture, majority_shares
from gar.data.registry import mixture_names, registry
from gar.data.task import Task
from gar.distributed import Job, device_of_rank
from gar.errors import UserError, nearest
from gar.methods import GAR, Method
from gar.model import MultiTaskModel
from gar.runs.directory import RunDirectory, check_directory, finished, hold
from gar.runs.environment import computing_threads, resolve_device
from gar.runs.files import write_text
from gar.runs.history import History
from gar.runs.names import MODEL, SCHEMA
from gar.runs.result import RunResult
from gar.runs.tracking import Tracker
from gar.training.card import model_card
from gar.training.failure import TrainingFailure
from gar.training.loop import Hooks, fit
from gar.training.sharing import Shared, Start, start

IN_MEMORY = (
    "# Made by gar.train from a mixture in memory: where its data came from is not known here,\n"
    "# and whether it was a sample; result.json has the numbers of examples.\n"
)


def train(
    model: MultiTaskModel,
    mixture: Mixture,
    method: Method | None = None,
    *,
    config: Config | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    hooks: Hooks | None = None,
    job: Job | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train a model in place on a mixture; returns the result (the content of result.json).

    ``options`` are keys of :class:`~gar.config.OptimizerConfig` (``updates=500``, ``learning_rate=1e-3``)
    or of :class:`~gar.config.Config` (``seed=1``, ``observation="per_group"``); everything else comes from
    the model and the mixture. With ``out`` the run is kept in that directory, see ``docs/files.md``;
    ``resume=True`` goes on from its last checkpoint; of a finished run it returns the result, and gives
    ``model`` the weights. On several processes each calls this with the same arguments and its ``job``
    (:func:`gar.distributed.joined`), see ``docs/ranks.md``.
    """
    job = job or Job.alone()
    described = config is not None
    if config is None:
        config = _config_of(model, mixture, method or GAR(), options)
    elif options or method is not None:
        raise TypeError("give either config= or method and options, not both")
    else:
        _check_described(config, model, mixture)
    check_mixture(model.tasks, mixture)
    begun = Start.of(model, mixture, config)
    with computing_threads(config.threads):
        _place(model, config, job)
        _compare_data(begun, job)
        if out is None:
            return _fit(begun, config, None, hooks, job).to_dict()
        path = Path(out)
        if resume and (result := job.told(lambda: finished(path, config))) is not None:
            if (path / MODEL).is_dir():  # a sweep may have dropped it
                model.load_weights(path / MODEL)
            return result.to_dict()
        with _held(path, config, resume, begun, job, "" if described else IN_MEMORY) as directory:
            return _fit(begun, config, directory, hooks, job).to_dict()


def train_from_config(
    config: Config,
    out: str | Path,
    *,
    resume: bool = False,
    hooks: Hooks | None = None,
    shared: Shared | None = None,
    probe: bool = False,
    job: Job | None = None,
) -> dict[str, Any]:
    """Load the mixture, build the model on its backbone, and :func:`train` into ``out``.

    A finished run is not loaded again: with ``resume`` its result is returned. ``shared`` keeps what this run
    loads for the next one that is given it, see :class:`Shared`. With ``probe`` the run trains on 90 % of the
    training splits and is measured on the rest, the validation splits have no part in it. ``job`` as for
    :func:`train`.
    """
    directory, job = Path(out), job or Job.alone()
    if resume and (result := job.told(lambda: finished(directory, config))) is not None:
        return result.to_dict()
    job.first(lambda: check_directory(directory, resume))
    with computing_threads(config.threads):
        begun = job.each(lambda: start(config, shared, probe))
        _place(begun.model, config, job)
        _compare_data(begun, job)
        with _held(directory, config, resume, begun, job) as held:
            return _fit(begun, config, held, hooks, job).to_dict()


def _place(model: MultiTaskModel, config: Config, job: Job) -> None:
    device = job.each(lambda: resolve_device(device_of_rank(config.device, job)))
    model.to(device)
    job.use(device)


def _compare_data(begun: Start, job: Job) -> None:
    """Every rank reads the data itself; ranks with other examples would train on what nobody has."""
    if job.count == 1:
        return
    first, *others = job.control.collect(begun.digests())
    for rank, found in enumerate(others, 1):
        differing = next((task for task in first if found.get(task) != first[task]), None)
        if differing is not None:
            raise UserError(
                f"task {differing}: rank {rank} has other examples than rank 0; expected the same data on all"
            )


@contextmanager
def _held(
    path: Path, config: Config, resume: bool, begun: Start, job: Job, note: str = ""
) -> Iterator[RunDirectory | None]:
    """The run directory, which the first rank alone holds; None on the others."""
    split = begun.model.draws_by_pass
    with ExitStack() as stack:
        holding = partial(
            hold, path, config, resume, note=note, data=begun.digests(), keeps_split=split, ranks=job.count
        )
        yield job.first(lambda: stack.enter_context(holding()))


def _fit(
    begun: Start, config: Config, directory: RunDirectory | None, hooks: Hooks | None, job: Job
) -> RunResult:
    """Train, measure, and leave a finished directory behind, where there is one."""
    model, mixture, hooks = begun.model, begun.mixture, hooks or Hooks()
    path = None if directory is None else directory.path
    if not job.is_first:
        hooks = Hooks()
        config = config.model_copy(update={"tracking": "none"})
    with closing(Tracker(config.tracking, path, config.to_dict())) as tracker:
        history = History(None if directory is None else directory.history, tracker)
        try:
            for change in [] if directory is None else directory.changed:
                hooks.message(
                    f"goes on although {change}: the same up to rounding, see docs/reproducibility.md"
                )
            with job.explained():
                limit = job.told(
                    lambda: (directory.in_force(config) if directory else config).max_tokens_per_pass
                )
                sections = fit(
                    model,
                    mixture,
                    config.model_copy(update={"max_tokens_per_pass": limit}),
                    history=history,
                    checkpoints=None if directory is None else directory.checkpoints,
                    resume=directory is not None and directory.begun,
                    hooks=hooks,
                    record=None if directory is None else directory.record_split,
                    sources=begun.sources,
                    selection=begun.selection,
                    job=job,
                )
                result = _result(config, mixture, sections)
                job.first(lambda: _finish(directory, result, sections, begun, config))
        except Exception as error:
            if directory is not None:
                update = error.update if isinstance(error, TrainingFailure) else history.last_update
                with suppress(OSError):  # a full disk must not hide the error itself
                    history.flush()
                    directory.fail(type(error).__name__, str(error), update)
            raise
        tracker.log(result.updates, {"evaluation": {key: sections[key] for key in ("accuracy", "routing")}})
    return result


def _finish(
    directory: RunDirectory | None,
    result: RunResult,
    sections: dict[str, Any],
    begun: Start,
    config: Config,
) -> None:
    if directory is None:
        return
    card = model_card(begun.model, config, begun.mixture, result.to_dict())
    _save_model(directory.model, begun.model, card)
    directory.finish(result, sections["diagnosis"])


def _save_model(directory: Path, model: MultiTaskModel, card: str) -> None:
    try:
        model.save_pretrained(directory)
        write_text(directory / "README.md", card)
    except UserError:
        raise
    except Exception as error:  # the libraries in Rust wrap the system's errors, some in bare exceptions
        if not isinstance(error, OSError | SafetensorError) and "os error" not in str(error):
            raise
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"{directory}: the model could not be written ({reason}); checkpoints are kept"
        ) from error


def _result(config: Config, mixture: Mixture, sections: dict[str, Any]) -> RunResult:
    return RunResult.model_validate(
        {
            "schema": SCHEMA,
            "method": config.method.name,
            "mixture": mixture.name,
            "seed": config.seed,
            "updates": sections["updates"],
            "examples": {task.name: (len(task.train), len(task.validation)) for task in mixture.tasks},
            "majority": majority_shares(mixture),
            **{key: sections[key] for key in ("accuracy", "routing", "timing")},
        }
    )


def _config_of(model: MultiTaskModel, mixture: Mixture, method: Method, options: Mapping[str, Any]) -> Config:
    optimizer = {key: value for key, value in options.items() if key in OptimizerConfig.model_fields}
    rest = {key: value for key, value in options.items() if key not in optimizer}
    for key in rest:
        if key in (*model.description, "mixture"):
            raise UserError(f"train: option {key!r} belongs to the model or the mixture, which are given")
        if key not in Config.model_fields:
            known = [*OptimizerConfig.model_fields, *Config.model_fields]
            raise UserError(f"train: unknown option {key!r}{nearest(key, known)}")
    try:
        return Config.model_validate(
            {
                **model.description,
                "method": method,
                "mixture": _described(mixture),
                **({"optimizer": optimizer} if optimizer else {}),
                **rest,
            }
        )
    except ValidationError as error:
        raise UserError(f"train: {explain(error, Config)}") from None


def _check_described(config: Config, model: MultiTaskModel, mixture: Mixture) -> None:
    """A configuration given beside a model and a mixture must describe them."""
    facts = {
        **{key: (getattr(config, key), found) for key, found in model.description.items()},
        "mixture.batch_size": (config.mixture.batch_size, mixture.batch_size),
        "mixture.group_size": (config.mixture.group_size, mixture.group_size),
    }
    for key, (said, found) in facts.items():
        if said != found:
            raise UserError(f"train: {key} of config= is {said!r}, but the given one has {found!r}")


def _described(mixture: Mixture) -> MixtureConfig:
    """What a mixture in memory tells about itself: registered names where they fit, no files otherwise."""
    tasks = tuple(task.name if _is_registered(task) else _as_config(task) for task in mixture.tasks)
    name: str | None = mixture.name
    if mixture.name in mixture_names():
        same = tasks == registry().mixtures.get(mixture.name)
        name, tasks = (name, ()) if same else (None, tasks)
    return MixtureConfig(name=name, batch_size=mixture.batch_size, group_size=mixture.group_size, tasks=tasks)


def _is_registered(task: Task) -> bool:
    entry = registry().tasks.get(task.name)
    return entry is not None and entry.labels == task.labels and len(entry.text) == len(task.text)


def _as_config(task: Task) -> TaskConfig:
    text = task.text[0] if len(task.text) == 1 else (task.text[0], task.text[1])
    return TaskConfig(name=task.name, text=text, labels=task.labels)

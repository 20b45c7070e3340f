"""The configuration tree: pydantic models, YAML in and out, ``key.sub=value`` overrides.

Every key has a default, so a file names only what differs. Unknown keys and values are refused with the
nearest valid name. Every key says on its field what it is about (:class:`Kind`); whoever compares two
configurations - a resumed run, a sweep, the report - asks there.
"""

from __future__ import annotations

import copy
import enum
import hashlib
import json
import re
import types
import typing
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializeAsAny,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_serializer,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic.fields import FieldInfo

from gar.errors import UserError, nearest, path_kind, real_path, user_path
from gar.methods import GAR, Choices, Method, carried, from_config
from gar.plugins import anchored_plugin, load_plugins

__all__ = [
    "BackboneConfig",
    "CacheConfig",
    "CheckpointConfig",
    "Config",
    "EvaluationConfig",
    "ExpertsConfig",
    "MixtureConfig",
    "ObservationConfig",
    "OptimizerConfig",
    "PlantedConfig",
    "TaskConfig",
    "build",
    "load",
]

#: Planted tasks: parts of the categories that conflict or agree as a whole, and what there are words for,
#: the texts being those of one topic and category.
PARTS, CATEGORIES, TOPICS, TEXTS = 4, 24, 24, 576
#: Keys whose value decides what other keys mean.
NAMING = ("method", "method.name", "mixture", "mixture.name")
#: Sections that may be written as one value, and the key which that is.
SHORT = {"method": "name", "mixture": "name", "observation": "backward"}


class Kind(enum.StrEnum):
    """What a configuration key is about; a key that does not say is part of the result."""

    RESULT = "result"
    """What is computed: another value, another result."""
    PLACE = "place"
    """Where and how it is computed: the same result up to rounding. A resumed run may have another one, and
    says so."""
    BOOKKEEPING = "bookkeeping"
    """What is kept, shown or called on the way."""


#: ``key: Place[str] = ...`` in a section.
T = typing.TypeVar("T")
Result = Annotated[T, Kind.RESULT]
Place = Annotated[T, Kind.PLACE]
Bookkeeping = Annotated[T, Kind.BOOKKEEPING]


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads 1e-3 (no dot, or no sign) as a string; users mean a number."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class BackboneConfig(Section):
    """The pretrained model under the experts."""

    name: str = Field("minilm", description="hub id, local directory, or 'minilm' (the packaged MiniLM-L6)")
    revision: str | None = Field(None, description="hub revision")
    trainable: bool = Field(False, description="train the backbone too")
    dtype: Literal["float32", "bfloat16", "float64"] = Field("float32", description="dtype of its weights")
    pooling: Literal["mean", "first", "last"] = Field("mean", description="over non-padding tokens")
    max_length: int = Field(
        128, ge=8, description="tokens; longer inputs are truncated, longest segment first"
    )
    gradient_checkpointing: Place[bool] = Field(
        False, description="trade time for memory in a trainable backbone"
    )
    random_weights: bool = Field(False, description="fresh weights from the config (benchmarks, smoke runs)")


class ExpertsConfig(Section):
    """Where the experts sit and how units are routed to them."""

    site: Literal["lora_ffn", "full_ffn", "lora_head"] = "lora_ffn"
    count: int = Field(8, ge=1, description="E")
    top_k: int = Field(4, ge=1, description="experts per unit; 1 means the straight-through gate")
    rank: int = Field(16, ge=1)
    alpha: float = Field(16.0, gt=0, description="LoRA scale is alpha / rank")
    dropout: float = Field(0.1, ge=0, lt=1, description="on the expert input")
    dropout_mask: Literal["shared", "per_expert"] = "shared"

    @property
    def routes_examples(self) -> bool:
        """Whether whole examples are routed, not their tokens."""
        return {"lora_ffn": False, "full_ffn": False, "lora_head": True}[self.site]

    @model_validator(mode="after")
    def _top_k_fits(self) -> Self:
        if self.top_k > self.count:
            raise ValueError(
                f"experts.top_k is {self.top_k} but experts.count is {self.count}; expected top_k <= count"
            )
        return self


class TaskConfig(Section):
    """A task of the user's own: local files or a hub data set."""

    name: str = Field(min_length=1)
    train: Place[str | None] = Field(None, description="file: .csv .tsv .jsonl .parquet, each also .gz")
    validation: Place[str | None] = None
    text: str | tuple[str, str] = Field("text", description="text column, or [a, b] for pairs")
    label: str = Field("label", description="label column")
    labels: tuple[str, ...] | None = Field(None, description="declared label names, in index order")
    hub: str | None = Field(None, description="hub data set id instead of files")
    hub_config: str | None = None
    train_split: str = "train"
    validation_split: str = "validation"
    drop_empty: bool = Field(
        False, description="drop rows with an empty text or label instead of refusing them"
    )

    @field_validator("labels", mode="before")
    @classmethod
    def _label_names(cls, value: Any) -> Any:
        if isinstance(value, list | tuple):
            if any(isinstance(name, bool) for name in value):
                raise ValueError(
                    "YAML reads unquoted yes/no/true/false as booleans; expected quoted label names"
                )
            return tuple(str(name) if isinstance(name, int | float) else name for name in value)
        return value


class PlantedConfig(Section):
    """Made-up tasks whose right grouping is known; see :func:`gar.data.planted`."""

    clusters: int = Field(6, ge=1, le=CATEGORIES // PARTS, description="groups of tasks that share a rule")
    tasks_per_cluster: int = Field(2, ge=1)
    strength: float = Field(
        1.0, ge=0, le=1, description="share of the texts to which any two clusters give different labels"
    )
    train_examples: int = Field(240, ge=1, description="per task")
    validation_examples: int = Field(240, ge=1, description="per task")
    seed: int = Field(0, ge=0, description="of the texts; that of weights and order is the run's own")

    @property
    def classes(self) -> int:
        """Labels of every task."""
        return max(2, self.clusters)

    @property
    def cells(self) -> int:
        """Categories in use, which all have as many texts."""
        return PARTS * self.classes

    @model_validator(mode="after")
    def _divisible(self) -> Self:
        tasks = self.clusters * self.tasks_per_cluster
        if tasks > TOPICS:
            raise ValueError(
                f"clusters x tasks_per_cluster is {tasks}; expected {TOPICS} or less, one topic a task"
            )
        if not (self.strength * PARTS).is_integer():
            shares = ", ".join(f"{i / PARTS:g}" for i in range(PARTS + 1))
            raise ValueError(f"strength is {self.strength:g}; expected one of {shares}")
        for name in ("train_examples", "validation_examples"):
            found = getattr(self, name)
            if found % self.cells:
                near = max(1, round(found / self.cells)) * self.cells
                raise ValueError(
                    f"{name} is {found}; expected a multiple of {self.cells}, as many for each of "
                    f"{self.cells} categories, e.g. {near}"
                )
        wanted = (self.train_examples + self.validation_examples) // self.cells
        if wanted > TEXTS:
            raise ValueError(
                f"train_examples and validation_examples need {wanted} texts of a category; "
                f"there are {TEXTS}: expected {TEXTS * self.cells} or less together"
            )
        return self


class MixtureConfig(Section):
    name: str | None = Field(None, description="a named mixture (five, six, …); tasks then come from it")
    batch_size: int = Field(32, ge=1, description="examples per task and update")
    group_size: int = Field(8, ge=1, description="examples per group")
    tasks: tuple[str | TaskConfig, ...] = Field((), description="registered names or tasks of your own")
    planted: PlantedConfig | None = Field(None, description="made-up tasks in place of `tasks`")
    max_train_examples: int | None = Field(None, ge=1, description="first N of a fixed shuffle, per task")
    max_validation_examples: int | None = Field(None, ge=1)

    @model_validator(mode="before")
    @classmethod
    def _planted_by_name(cls, value: Any) -> Any:
        named = isinstance(value, Mapping) and str(value.get("name")).lower() == "planted"
        if named and not value.get("tasks") and value.get("planted") is None:
            return {**value, "planted": {}}
        return value

    @model_serializer(mode="wrap")
    def _without_planted(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # Where there is none, it is left out: runs of before this key keep their digests.
        tree: dict[str, Any] = handler(self)
        return tree if self.planted else {k: v for k, v in tree.items() if k != "planted"}

    @property
    def size(self) -> int | None:
        """The number of tasks; None where only the mixture's name tells."""
        if self.planted is not None:
            return self.planted.clusters * self.planted.tasks_per_cluster
        return len(self.tasks) or None


class OptimizerConfig(Section):
    learning_rate: float = Field(1e-3, gt=0)
    weight_decay: float = Field(0.01, ge=0)
    clip: float = Field(1.0, gt=0, description="global gradient norm")
    updates: int = Field(2000, ge=1)
    epochs: float | None = Field(None, gt=0, description="of the largest task; replaces updates")
    warmup: float = Field(0.1, ge=0, le=1, description="share of the updates with rising rate")


class EvaluationConfig(Section):
    every: Bookkeeping[int] = Field(
        0, ge=0, description="updates between evaluations during training; 0: only at the end"
    )
    batch_tokens: Place[int | None] = Field(
        None, ge=1, description="padded tokens per forward pass; default: what suits the device"
    )
    probe_examples: int = Field(
        256, ge=1, description="per task, for the gradient probe; checked between whole loader batches"
    )
    selection: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="held out share of every training split, measured at the end to choose models by",
    )

    @model_serializer(mode="wrap")
    def _without_selection(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # Off, it is left out: runs of before this key have the same configuration, and the same digest.
        tree: dict[str, Any] = handler(self)
        return tree if self.selection else {k: v for k, v in tree.items() if k != "selection"}


class CheckpointConfig(Section):
    every: Bookkeeping[int] = Field(
        0, ge=0, description="updates between checkpoints; 0: only at the end or when interrupted"
    )
    pause: Bookkeeping[float] = Field(
        0, ge=0, description="least seconds between two of them while training goes on"
    )
    keep: Bookkeeping[int] = Field(2, ge=1)


class CacheConfig(Section):
    """The frozen-prefix feature cache."""

    enabled: Place[bool] = True
    directory: Place[str | None] = Field(None, description="default: $GAR_CACHE or ~/.cache/gar")
    dtype: Literal["float32", "float16"] = "float32"


class ObservationConfig(Section):
    """The rows of gradients that methods read; ``observation: per_group`` is short for its ``backward``."""

    backward: Literal["one_pass", "per_group"] = Field(
        "one_pass", description="from the factors of one backward, or by a backward a group"
    )
    unit: Result[Literal["group", "example", "token"]] = Field(
        "group", description="what a row is of: a group's mean loss, an example's, or one token's part of it"
    )
    rows: Result[int | None] = Field(
        None, ge=1, description="examples or tokens drawn from every update, uniformly; null: all of them"
    )

    @model_validator(mode="before")
    @classmethod
    def _backward_alone(cls, value: Any) -> Any:
        return {"backward": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.unit == "group" and self.rows is not None:
            raise ValueError(
                f"observation.rows is {self.rows}, but groups are not drawn from; "
                "expected observation.unit example or token"
            )
        if self.unit != "group" and self.backward == "per_group":
            raise ValueError(
                f"observation.unit is {self.unit}, whose rows no backward a group gives; "
                "expected observation.backward one_pass"
            )
        return self

    @model_serializer(mode="wrap")
    def _short(self, handler: SerializerFunctionWrapHandler) -> str | dict[str, Any]:
        # Rows of groups are written as before this section: such runs keep their configurations.
        if self.unit == "group":
            return self.backward
        return {key: value for key, value in handler(self).items() if value is not None}


class Config(Section):
    """One run, fully described."""

    backbone: BackboneConfig = BackboneConfig()
    experts: ExpertsConfig = ExpertsConfig()
    method: SerializeAsAny[Method] = GAR()
    mixture: MixtureConfig = MixtureConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    cache: CacheConfig = CacheConfig()
    observation: Place[ObservationConfig] = ObservationConfig()
    precision: Literal["float32", "tf32", "bfloat16"] = Field(
        "float32", description="of the model's products; tf32 is float32 on a CPU, bfloat16 is autocast"
    )
    max_tokens_per_pass: Place[int | Literal["auto"] | None] = Field(
        "auto", description="padded tokens; an update is split over passes of whole groups (auto: what fits)"
    )
    capture: Place[bool] = Field(
        True,
        description="on a GPU, replay updates as CUDA graphs where nothing waits; false: launch each kernel",
    )
    device: Place[str] = Field("auto", description="auto, cpu, cuda, cuda:1, …")
    threads: Place[int | None] = Field(
        None, ge=1, description="CPU threads; default: $OMP_NUM_THREADS, else all cores"
    )
    plugins: Place[tuple[str, ...]] = Field(
        (), description="modules (or .py files) of your own, with methods or metrics"
    )
    data_dir: Place[str | None] = Field(
        None, description="DIR/<task>/{train,validation}.jsonl[.gz] in place of the hub"
    )
    tracking: Bookkeeping[Literal["none", "tensorboard", "wandb", "trackio", "mlflow"]] = "none"
    preset: Bookkeeping[str | None] = Field(
        None, description="the paper preset this configuration came from, if any"
    )
    seed: int = Field(0, ge=0)

    @field_validator("method", mode="before")
    @classmethod
    def _method(cls, value: Any) -> Any:
        return value if isinstance(value, Method) else from_config(value)

    @field_serializer("method")
    def _method_out(self, method: Method) -> dict[str, Any]:
        return method.to_config()

    @field_validator("max_tokens_per_pass", mode="before")
    @classmethod
    def _tokens(cls, value: Any) -> Any:
        number = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        if not number and value not in (None, "auto"):
            raise ValueError(
                f"max_tokens_per_pass is {value!r}; expected auto, a number of tokens (1 or more) or null"
            )
        return value

    @field_validator("mixture", mode="before")
    @classmethod
    def _named_mixture(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _compatible(self) -> Self:
        self.check_method(self.mixture.size)
        unit = self.observation.unit
        if unit == "token" and self.experts.routes_examples:
            raise UserError(
                f"observation.unit is token, but experts.site {self.experts.site} routes whole examples; "
                "expected group or example"
            )
        if unit != "group" and not self.method.finer_rows:
            raise UserError(
                f"observation.unit is {unit}, but method {self.method.name} reads gradients of groups; "
                "expected group"
            )
        return self

    def check_method(self, tasks: int | None) -> None:
        """Refuse a method that cannot run with these experts and ``tasks`` tasks (None: not known yet)."""
        mixture, experts = self.mixture, self.experts
        groups = None if tasks is None else tasks * -(-mixture.batch_size // mixture.group_size)
        choices = Choices(experts.site, experts.count, experts.top_k, groups, tasks)
        if problem := self.method.check(choices):
            raise UserError(f"method.name is {self.method.name}: {problem}")

    def to_dict(self) -> dict[str, Any]:
        """A plain tree that YAML and JSON can hold and :func:`build` takes back unchanged."""
        return self.model_dump(mode="json")

    def override(self, overrides: Iterable[str] | Mapping[str, Any]) -> Config:
        """A copy with ``key.sub=value`` strings (or a dotted mapping) applied and checked."""
        return build(overridden(self.to_dict(), overrides))


def overridden(tree: dict[str, Any], overrides: Iterable[str] | Mapping[str, Any]) -> dict[str, Any]:
    """``tree`` with overrides set, in place. Names come first: they reset what belongs to another."""
    if not isinstance(overrides, Mapping):
        overrides = parse_overrides(overrides)
    for dotted, value in sorted(overrides.items(), key=lambda item: item[0] not in NAMING):
        set_key(tree, dotted, value)
    return tree


def set_key(tree: dict[str, Any], dotted: str, value: Any) -> None:
    """Set ``tree[a][b] = value`` for ``"a.b"``.

    Naming another method drops the old one's coefficients; ``gar+zloss`` after ``gar`` keeps those of gar.
    """
    for key, own in SHORT.items():
        if isinstance(tree.get(key), str):
            tree[key] = {own: tree[key]}
    if dotted == "mixture" and isinstance(value, str):
        kept = {k: v for k, v in _mapping(tree.get("mixture")).items() if k != "planted"}
        value = {**kept, "name": value, "tasks": []}
    if dotted == "method" and isinstance(value, str):
        dotted = "method.name"
    section = _mapping(tree.get("method"))
    if dotted == "method.name" and section.get("name") != value:
        tree["method"] = carried(section, str(value))
    *parents, last = dotted.split(".")
    node = tree
    for i, key in enumerate(parents):
        child = node.setdefault(key, {})
        if not isinstance(child, dict):
            raise UserError(f"{dotted}: {'.'.join(parents[: i + 1])} is a value, not a section")
        node = child
    node[last] = value


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def parse_overrides(items: Iterable[str]) -> dict[str, Any]:
    """``["optimizer.updates=10"]`` to ``{"optimizer.updates": 10}``; values are read as YAML."""
    parsed: dict[str, Any] = {}
    for item in items:
        key, equals, text = item.partition("=")
        if not equals or not key.strip():
            raise UserError(f"override {item!r}: expected key.sub=value, e.g. optimizer.updates=500")
        try:
            parsed[key.strip()] = _anchored_here(key.strip(), yaml.load(text, _Loader))
        except yaml.YAMLError:
            raise UserError(f"override {item!r}: the value is not readable as YAML") from None
    return parsed


def _anchored_here(key: str, value: Any) -> Any:
    """The value of a dotted key with its paths, as written in the working directory, made absolute."""
    *parents, last = key.split(".")
    tree: dict[str, Any] = {last: value}
    for parent in reversed(parents):
        tree = {parent: tree}
    node = anchor_paths(tree, Path.cwd())
    for parent in parents:
        node = node[parent]
    return node[last]


def load_tree(path: str | Path) -> dict[str, Any]:
    """Read a YAML mapping; relative data paths inside it become relative to the file."""
    path = Path(path)
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise UserError(f"{path}: is a directory, expected a YAML file") from None
    except (OSError, ValueError) as error:
        if isinstance(error, UnicodeDecodeError):
            raise UserError(f"{path}: not UTF-8 at byte {error.start}") from None
        raise UserError(
            f"{str(path)!r}: cannot be read ({getattr(error, 'strerror', None) or error})"
        ) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise UserError(
            f"{path}{where}: not valid YAML ({getattr(error, 'problem', None) or error})"
        ) from None
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        raise UserError(f"{path}: expected a mapping of configuration keys, found {type(tree).__name__}")
    return anchor_paths(tree, real_path(path).parent)


def load(path: str | Path, overrides: Iterable[str] | Mapping[str, Any] = ()) -> Config:
    """The configuration in a YAML file, with overrides."""
    return build(overridden(load_tree(path), overrides), str(path))


def build(tree: Mapping[str, Any], where: str = "configuration") -> Config:
    """Validate a plain tree; the first problem becomes one :class:`~gar.errors.UserError` line.

    Plugins that the tree names are loaded first: they may bring its method.
    """
    plugins = tree.get("plugins") or ()
    if isinstance(plugins, list | tuple) and all(isinstance(name, str) for name in plugins):
        load_plugins(plugins, where)
    try:
        return Config.model_validate(copy.deepcopy(dict(tree)))
    except ValidationError as error:
        raise UserError(f"{where}: {explain(error, Config)}") from None


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """The first problem of a pydantic error as one line: key, what was found, what was expected."""
    problem = _most_telling(error)
    location = [str(part) for part in problem["loc"] if not str(part).endswith("Config") and part != "str"]
    key = ".".join(location)
    found = repr(problem.get("input"))
    found = found if len(found) <= 60 else found[:57] + "…"
    if problem["type"] == "extra_forbidden":
        known = _keys_at(model, location[:-1])
        hint = nearest(location[-1], known) or (f"; known keys: {', '.join(known)}" if known else "")
        return f"unknown key {key!r}{hint}"
    if problem["type"] == "missing":
        return f"missing key {key!r}"
    if problem["type"] == "literal_error":
        expected = problem["ctx"]["expected"]
        names = [name.strip(" '") for name in expected.replace(" or ", ",").split(",")]
        return f"{key} is {found}; expected {expected}{nearest(problem.get('input'), names)}"
    message = str(problem["msg"]).removeprefix("Value error, ")
    if problem["type"] == "value_error":
        return f"{key}: {message}" if key and not message.startswith(key) else message
    return f"{key} is {found}; {message[0].lower()}{message[1:]}"


def _most_telling(error: ValidationError) -> Any:
    # A union reports every branch; the branch that got furthest is the one the user meant.
    return max(error.errors(), key=lambda e: (len(e["loc"]), e["type"] != "string_type"))


def _keys_at(model: type[BaseModel], location: list[str]) -> list[str]:
    current: Any = model
    for part in location:
        if part.isdigit():
            continue
        if not (
            isinstance(current, type) and issubclass(current, BaseModel) and part in current.model_fields
        ):
            return []
        current = current.model_fields[part].annotation
        for candidate in _members(current):
            if isinstance(candidate, type) and issubclass(candidate, BaseModel):
                current = candidate
                break
    return list(current.model_fields) if isinstance(current, type) and issubclass(current, BaseModel) else []


def _members(annotation: Any) -> list[Any]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, tuple, typing.Annotated):
        return [m for a in typing.get_args(annotation) for m in _members(a)]
    return [annotation]


def anchor_paths(tree: dict[str, Any], base: Path) -> dict[str, Any]:
    def anchored(value: Any) -> Any:
        return str(base / user_path(value)) if isinstance(value, str) else value

    mixture = tree.get("mixture")
    if isinstance(mixture, dict) and isinstance(mixture.get("tasks"), list):
        for task in mixture["tasks"]:
            if isinstance(task, dict):
                for key in ("train", "validation"):
                    if key in task:
                        task[key] = anchored(task[key])
    if tree.get("data_dir") is not None:
        tree["data_dir"] = anchored(tree["data_dir"])
    if isinstance(tree.get("plugins"), str):
        tree["plugins"] = [tree["plugins"]]
    if isinstance(tree.get("plugins"), list):
        tree["plugins"] = [anchored_plugin(name, base) for name in tree["plugins"]]
    cache = tree.get("cache")
    if isinstance(cache, dict) and cache.get("directory") is not None:
        cache["directory"] = anchored(cache["directory"])
    backbone = tree.get("backbone")
    if isinstance(backbone, dict) and isinstance(backbone.get("name"), str):
        name = backbone["name"]
        # A hub id is also a valid relative path, so only an existing directory is one.
        if name.startswith((".", "~")) or path_kind(base / name) == "directory":
            backbone["name"] = anchored(name)
    return tree


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A tree's values by dotted keys.

    >>> flat({"seed": 1, "optimizer": {"clip": 1.0}})
    {'seed': 1, 'optimizer.clip': 1.0}
    """
    values: dict[str, Any] = {}
    for key, value in tree.items():
        values |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return values


# ---------------------------------------------------------------------- what keys are about


def kind_of(key: str) -> Kind:
    """What a dotted key is about; an unknown one, of a newer version, counts as part of the result.

    >>> kind_of("device"), kind_of("cache.dtype"), kind_of("checkpoint.every")
    (<Kind.PLACE: 'place'>, <Kind.RESULT: 'result'>, <Kind.BOOKKEEPING: 'bookkeeping'>)
    """
    model: type[BaseModel] | None = Config
    kind = Kind.RESULT
    for part in key.split("."):
        field = model.model_fields.get(part) if model is not None else None
        if field is None:
            return Kind.RESULT
        kind = _said(field) or kind
        model = _section(field.annotation)
    return kind


def result_only(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration's tree with the keys that make the result: what two runs of one thing share.

    Where a task's files lie is a place; which data they hold, :func:`gar.data.identity` says.
    """
    return _of_kind(tree, Config)


def digest(tree: Mapping[str, Any]) -> str:
    """Of what a configuration computes, its seed and its data aside."""
    content = result_only({**tree, "seed": None})
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()


def _said(field: FieldInfo) -> Kind | None:
    """The kind that a key names; what is below it may name another."""
    return next((item for item in field.metadata if isinstance(item, Kind)), None)


@cache
def _keys(model: type[BaseModel]) -> dict[str, tuple[Kind | None, type[BaseModel] | None]]:
    """What each key of a section says of its kind, and the section below it."""
    return {key: (_said(field), _section(field.annotation)) for key, field in model.model_fields.items()}


def _of_kind(
    tree: Mapping[str, Any], model: type[BaseModel] | None, kind: Kind = Kind.RESULT
) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    known = {} if model is None else _keys(model)
    for key, value in tree.items():
        said, section = known.get(key, (None, None))
        own = said or kind
        if own is not Kind.RESULT:
            below = _of_kind(value, section, own) if isinstance(value, Mapping) and section else {}
            if below:
                kept[key] = below
            continue
        if isinstance(value, Mapping):
            value = _of_kind(value, section)
        elif isinstance(value, list | tuple):
            value = [_of_kind(item, section) if isinstance(item, Mapping) else item for item in value]
        kept[key] = value
    return kept


def _section(annotation: Any) -> type[BaseModel] | None:
    """The model behind a field, the items of a tuple included."""
    found = (m for m in _members(annotation) if isinstance(m, type) and issubclass(m, Section))
    return next(found, None)

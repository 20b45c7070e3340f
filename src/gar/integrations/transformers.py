"""GAR inside :class:`transformers.Trainer` and trainers made of it, TRL's ``SFTTrainer`` above all.

The mixin overrides :meth:`GARMixin.training_step` (and what brings the groups there): the one ordinary
backward of every micro-batch is observed, and on the last one of an update, before gradients are clipped, the
routers get the gradient of the objective. Nothing else of a training changes. trl and peft are not imported.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
import transformers
from accelerate.utils import gather_object
from datasets import Dataset
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn
from transformers import PreTrainedModel

from gar.distributed import Layout, Ranks, global_gram, sum_tensors
from gar.errors import UserError, one_of
from gar.integrations._checkpoint import load_missing
from gar.integrations._checks import (
    refuse_auxiliary_loss,
    refuse_column,
    refuse_copies,
    refuse_optimizer,
    refuse_setting,
    refuse_sharded_banks,
    refuse_trainer,
    refuse_unequal_counts,
    require_router,
)
from gar.integrations._groups import GroupCollator, Groups, automatic_size, label_ids
from gar.integrations._packing import by_text, crosses, pack, texts_key
from gar.integrations._sharding import placed, whole_parameters
from gar.integrations._statistics import ExpertStatistics, adapter_parameters, reached
from gar.integrations._terms import LayerSite, named, terms_of
from gar.methods import RouterTerm
from gar.objective import alignment_loss, association, common_length
from gar.observation import Grouping, Observed, RowSum, SiteObservation, observe
from gar.routing import Routing

__all__ = ["GARArguments", "GARMixin", "GARTrainer"]

_log = logging.getLogger(__name__)
#: In the place of the update, which router losses here do not read.
_NOTHING: Any = None
#: What a slice of all groups' rows takes at most, between ranks.
SLICE_BYTES = 2**27
#: What rows can be held in.
DTYPES = ("float32", "bfloat16", "float16", "float64")


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class GARArguments:
    """Options of :class:`GARMixin`; ``transformers.HfArgumentParser`` reads them from a command line.

    The paper's form, which ``gar.methods.GAR`` has by default, is ``coefficient=1e-3, gradients="raw",
    group_size=8``. Raw gradients have another length in every model, and the same coefficient does nothing in
    one and everything in another; relative ones differ by one factor a layer and update.
    """

    group_column: str = _option(
        "group", "column of the training dataset, text or whole number, whose equal values may share a group"
    )
    group_size: int | None = _option(
        None,
        "examples a group. Default: 8, as in the paper, and fewer where an update would have less than twice "
        "E/k groups. 0: all examples of one value in an update are one group",
    )
    coefficient: float = _option(
        0.3, "lambda of the objective in the routers' gradient; 0: the plain trainer, to the bit"
    )
    warmup: int = _option(0, "updates over which the coefficient rises from 0")
    layers: list[int] | None = _option(None, "numbers of the layers that get the objective; default: all")  # noqa: RUF009
    objective: Literal["load_normalized", "numerator_only"] = _option(
        "load_normalized", "with or without the division by an expert's share"
    )
    entropy_weight: float = _option(0.0, "tau of the added sum p log p")
    gradients: Literal["raw", "unit", "label_scale", "relative"] = _option(
        "relative",
        "g_m as it is, of length 1, over the root mean square length of its label's, or over the root of all "
        "squared lengths of the update: the objective of a layer is then minus gar/coherence, 0 to 1",
    )
    probabilities: Literal["gates", "softmax"] = _option(
        "gates",
        "p_m from the model's own gates, or from the softmax over all experts, which reaches every expert",
    )
    self_pairs: bool = _option(True, "whether a group's pair with itself counts in the objective")
    balance_coefficient: float = _option(
        0.0,
        "of a balance loss of every layer over the whole update, E sum_e f_e P_e, added up over layers; in "
        "the place of the model's router_aux_loss_coef, which pools all layers, and a micro-batch alone",
    )
    router_losses: list[str] | None = _option(  # noqa: RUF009
        None,
        "losses of the routers alone, of every layer over the whole update, added up over layers: methods by "
        "name, NAME or NAME=COEFFICIENT (docs/methods.md), as in zloss=1e-3",
    )
    freeze_router: bool = _option(
        False, "train everything but the routers: they are frozen, and no loss of the routers is added"
    )
    statistics: Literal["mean", "layers", "off"] = _option(
        "mean", "what the experts do, in the logs: means over layers, every layer too, or nothing"
    )
    rows_dtype: str | None = _option(
        None,
        "dtype (float32, bfloat16) in which group gradients [M, d] of every layer are held from micro-batch "
        "to micro-batch; default: the experts' inputs and output gradients are held, or rows if smaller",
    )
    rows_device: str | None = _option(None, 'hold them there ("cpu"); default: where the experts are')

    def __post_init__(self) -> None:
        annotations = inspect.get_annotations(type(self), eval_str=True)
        for name in ("objective", "gradients", "probabilities", "statistics"):
            allowed = get_args(annotations[name])
            if getattr(self, name) not in allowed:
                raise one_of(f"GARArguments.{name}", getattr(self, name), allowed)
        for name, annotation in annotations.items():
            value = getattr(self, name)
            value = list(value) if isinstance(value, (tuple, range)) else value
            if name == "router_losses" and isinstance(value, str):
                continue  # `terms` says how it is written
            try:
                TypeAdapter(annotation).validate_python(value, strict=True)
            except ValidationError as error:
                expected = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
                kind = expected.get(annotation) or str(annotation).replace(" | ", " or ")
                raise UserError(f"GARArguments.{name} must be {kind}, got {value!r}") from error
        for name in ("coefficient", "warmup", "entropy_weight", "balance_coefficient", "group_size"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise UserError(f"GARArguments.{name} must be a number of at least 0, got {value!r}")
        if self.rows_dtype not in (None, *DTYPES):
            raise one_of("GARArguments.rows_dtype", self.rows_dtype, DTYPES)
        if self.rows_device is not None:
            try:
                torch.device(self.rows_device)
            except RuntimeError:
                raise UserError(
                    f'GARArguments.rows_device is {self.rows_device!r}; expected a device of torch, as "cpu"'
                ) from None
        self.terms  # noqa: B018 (a wrong name is said now)
        if self.layers is not None and not self.layers:
            raise UserError("GARArguments.layers is empty; expected numbers of layers, or None for all")

    @property
    def aligns(self) -> bool:
        """Whether routers get the gradient of the objective."""
        return self.coefficient > 0 and not self.freeze_router

    @property
    def balances(self) -> bool:
        """Whether routers get the gradient of the balance loss."""
        return self.balance_coefficient > 0 and not self.freeze_router

    @cached_property
    def terms(self) -> list[RouterTerm]:
        """The router losses whose coefficient is not 0; made once."""
        return terms_of(self.router_losses or [], "GARArguments.router_losses")

    @property
    def acts(self) -> bool:
        """Whether routers get anything beside the plain trainer's gradient."""
        return self.aligns or self.balances or (bool(self.terms) and not self.freeze_router)

    @property
    def observes(self) -> bool:
        return self.acts or self.statistics != "off"


def evenly(parts: Iterable[Tensor], width: int) -> Iterator[Tensor]:
    """Slices [m, c] of a matrix's columns as slices of ``width``, at least 1; the last may be shorter.

    >>> [part.shape[1] for part in evenly([torch.zeros(2, 3), torch.zeros(2, 4)], 5)]
    [5, 2]
    """
    left: Tensor | None = None
    for part in parts:
        left = part if left is None else torch.cat([left, part], 1)
        while left.shape[1] >= max(1, width):
            yield left[:, : max(1, width)]
            left = left[:, max(1, width) :]
    if left is not None and left.shape[1]:
        yield left


@dataclass
class _Layer:
    """What the micro-batches of one update brought to one MoE layer, on this rank."""

    rows: RowSum | None
    #: Summed gates of each group [M, E]; of all tokens, the softmax over all experts and the selections, [E].
    gates: Tensor
    soft: Tensor
    chosen: Tensor
    tokens: Tensor

    @property
    def sums(self) -> list[Tensor]:
        return [self.gates, self.soft, self.chosen, self.tokens]


@dataclass
class _Update:
    """An optimizer update in the making: ``examples[rank][micro-batch]`` has labels and numbers of losses.

    An example is a text: where several are packed into a row, each of them.
    """

    examples: list[list[tuple[list[int], list[int]]]]
    rank: int
    #: Of packed micro-batches of this rank the text of every token [B, L]; None where a row is an example.
    texts: list[Tensor | None]
    groups: Groups | None = None
    #: The group of every example [B], of the micro-batches of this rank.
    members: list[Tensor] = field(default_factory=list)
    #: The groups that each rank has examples of.
    present: list[Tensor] = field(default_factory=list)
    #: The observations of the layers that the objective is for; others are not kept.
    passes: list[dict[int, SiteObservation]] = field(default_factory=list)
    #: Which token is of which text, where texts are packed.
    splits: list[Grouping | None] = field(default_factory=list)
    layers: dict[int, _Layer] = field(default_factory=dict)

    @property
    def own(self) -> list[tuple[list[int], list[int]]]:
        return self.examples[self.rank]

    @property
    def over(self) -> bool:
        return len(self.passes) == len(self.own)

    @property
    def size(self) -> int:
        """Examples of the update."""
        return sum(len(labels) for rank in self.examples for labels, _ in rank)

    def cut(self, size: int) -> Groups:
        """The groups, made once; examples follow each other micro-batch by micro-batch, there rank by rank.

        So they are those of one process that does all ranks' micro-batches.
        """
        if self.groups is None:
            steps = range(max(map(len, self.examples)))
            order = [
                (rank, step) for step in steps for rank, of in enumerate(self.examples) if step < len(of)
            ]
            parts = [self.examples[rank][step] for rank, step in order]
            labels, items = ([value for part in parts for value in part[which]] for which in (0, 1))
            self.groups = Groups.of(labels, items, size)
            sizes = [len(labels) for labels, _ in parts]
            members = dict(zip(order, torch.tensor(self.groups.members).split(sizes), strict=True))
            self.members = [members[self.rank, step] for step in range(len(self.own))]
            for rank, of in enumerate(self.examples):
                every = torch.cat([members[rank, step] for step in range(len(of))]).unique()
                self.present.append(every[every >= 0])
        return self.groups


def _of_tokens(members: Tensor, texts: Tensor) -> Tensor:
    """The group of every token [B, L] from those of the texts [n]; -1: it is in none."""
    texts = texts.cpu()
    return torch.where(texts < 0, texts, members[texts.clamp(min=0)])


if TYPE_CHECKING:
    _Trainer = Any
else:
    _Trainer = object


class GARMixin(_Trainer):  # type: ignore[misc]
    """Adds gradient-aligned routing to a trainer: ``class T(GARMixin, trl.SFTTrainer)``.

    The trainer is made and used as before, with one more argument ``gar``, a :class:`GARArguments`. Every
    parameter but the routers' gets exactly the gradient of the plain trainer; a router gets, beside it,

        ``coefficient * d/d(router) sum_layers L_norm``   (:func:`gar.alignment_loss`)

    of the groups of the whole update, whatever micro-batches and ranks (DDP, FSDP2) it is made of: ``g_m`` is
    the gradient of group m's own mean loss (a token's, where the trainer averages over tokens), summed over
    the experts of a layer. It is added once an update, before the one clip. ``coefficient=0`` is the plain
    trainer to the bit.

    Raises :class:`gar.UserError` where the objective could not act: no trainable router, no such column, a
    built-in balance loss, DeepSpeed, FSDP1, ``torch_compile``.
    """

    def __init__(self, *args: Any, gar: GARArguments | None = None, **keywords: Any) -> None:
        if gar is not None and not isinstance(gar, GARArguments):
            raise UserError(f"gar is {gar!r}; expected GARArguments(...)")
        self.gar = GARArguments() if gar is None else gar
        if self.gar.observes:
            refuse_trainer(type(self))
        given = inspect.signature(super().__init__).bind_partial(*args, **keywords).arguments
        if self.gar.aligns:
            refuse_column(self.gar.group_column, given.get("train_dataset"))
        self._update: _Update | None = None
        #: Whether the last micro-batch's loss is a mean over its items, though Trainer told their number.
        self._is_mean = False
        #: Whether routers gave in an update, called again, what the model had used: they do or they do not.
        self._compared = False
        self._chosen: list[int] = []
        self._routers: dict[str, nn.Module] = {}
        self._ratio: float | None = None
        self.data_collator: Any
        self._signature_columns: Any
        self._warned: set[str] = set()
        self._expert_statistics: ExpertStatistics | None = None
        super().__init__(*args, **keywords)
        if self.gar.observes:
            refuse_copies(self.args)
        if self.gar.acts:
            refuse_setting(self)
            refuse_auxiliary_loss(self)
        self._look_at_model()

    def _look_at_model(self) -> None:
        """Find the MoE layers, freeze their routers if asked to, and check that the objective can act."""
        options = self.gar
        if not (options.observes or options.freeze_router):
            return
        try:
            with observe(self.model, gradients=False) as observed:
                sites = observed.sites
        except ValueError as error:
            if "no expert bank" not in str(error):
                raise
            raise UserError(
                f"{type(self.model).__name__} has no MoE layer; expected a model with experts of "
                "transformers (Qwen3-MoE, OLMoE, Mixtral, GPT-OSS, ...) or of gar.nn"
            ) from None
        if options.freeze_router:
            for site in sites:
                site.router.requires_grad_(False)
        if options.acts:
            if self.is_fsdp_enabled:
                refuse_sharded_banks(sites)
            self._chosen = require_router(sites, options.layers)
            self._routers = {sites[place].name: sites[place].router for place in self._chosen}
        self._ratio = None
        adapters = adapter_parameters(self.model)
        if self._expert_statistics is None or self._expert_statistics.adapters != list(adapters):
            names = [site.name if site.layer is None else f"layer_{site.layer}" for site in sites]
            self._expert_statistics = ExpertStatistics(names, adapters)

    # -------------------------------------------------------------------------- data

    def _prepare_dataset(self, *args: Any, **keywords: Any) -> Any:
        """``SFTTrainer``'s, which drops all columns but tokens when it packs; here groups are packed."""
        prepare = super()._prepare_dataset
        given = inspect.signature(prepare).bind(*args, **keywords)
        values = given.arguments
        if not (values.get("packing") and values.get("dataset_name") == "train"):
            return prepare(*args, **keywords)
        options, dataset = values["args"], values.get("dataset")
        # Statistics take groups where there are some.
        there = isinstance(dataset, Dataset) and self.gar.group_column in dataset.column_names
        wanted = self.gar.observes and there and options.packing_strategy == "bfd"
        if not (self.gar.aligns or wanted):
            return prepare(*args, **keywords)
        values["packing"] = False
        # Texts are cut to max_length, as packing itself does it.
        tokens = prepare(*given.args, **given.kwargs)
        return pack(tokens, options.max_length, self.gar.group_column, options.packing_strategy)

    def get_train_dataloader(self) -> Any:
        with self._collating(keep=self.gar.observes):
            return super().get_train_dataloader()

    def get_eval_dataloader(self, *args: Any, **keywords: Any) -> Any:
        with self._collating(keep=False):
            return super().get_eval_dataloader(*args, **keywords)

    def get_test_dataloader(self, *args: Any, **keywords: Any) -> Any:
        with self._collating(keep=False):
            return super().get_test_dataloader(*args, **keywords)

    @contextmanager
    def _collating(self, keep: bool) -> Iterator[None]:
        """Loaders made here take the group column out of examples; ``keep``: and put it into the batch."""
        column = self.gar.group_column
        self._set_signature_columns_if_needed()
        collator, columns = self.data_collator, self._signature_columns
        self.data_collator = GroupCollator(collator, column, keep, required=self.gar.aligns)
        if keep and column in columns:
            raise UserError(
                f"group_column {column!r} is an input of the model, which would miss it; expected a column "
                "of its own, say a copy under another name"
            )
        if keep:
            self._signature_columns = [*columns, column]
        try:
            yield
        finally:
            self.data_collator, self._signature_columns = collator, columns

    def get_batch_samples(self, *args: Any, **keywords: Any) -> tuple[list[Any], Any]:
        batches, count = super().get_batch_samples(*args, **keywords)
        # What an earlier update has left over (a data stream that ended in its middle) is dropped.
        self._update = self._begin(batches) if self.gar.observes and batches else None
        return batches, count

    def _begin(self, batches: Sequence[dict[str, Any]]) -> _Update:
        """The update that has these micro-batches on this rank."""
        own, column = [], self.gar.group_column
        packed = [batch.pop(texts_key(column), None) for batch in batches]
        for batch, texts in zip(batches, packed, strict=True):
            items, labels = self._items(batch, texts), batch.get(column)
            if labels is None and self.gar.aligns:
                raise UserError(
                    f"group_column {column!r}: it is not in the batches that reach the "
                    "training step; expected a data loader made by the trainer's get_train_dataloader"
                )
            if not isinstance(labels, Tensor):
                labels = torch.zeros_like(items) if labels is None else label_ids(labels)
            if len(labels) != len(items):
                raise UserError(
                    f"a batch of {len(items)} examples has {len(labels)} groups; expected one an example"
                )
            own.append((labels.tolist(), items.tolist()))
        of_ranks = gather_object([own])
        if self.is_fsdp_enabled:
            refuse_unequal_counts([len(batches) for batches in of_ranks])
        return _Update(of_ranks, self.accelerator.process_index, packed)

    def _items(self, batch: dict[str, Any], texts: Tensor | None = None) -> Tensor:
        """How many losses each example of a batch brings, int64 [B], counted as the trainer counts them."""
        labels = batch.get("shift_labels")
        if labels is None:
            labels = batch.get("labels")
            if isinstance(labels, Tensor) and labels.dim() > 1 and self._loss_shifts_labels:
                if texts is not None and crosses(labels, texts):
                    raise UserError(
                        "a packed text's first token is asked for from the text before it; expected -100 as "
                        "its label (TRL's collator does that)"
                    )
                labels, texts = labels[..., 1:], None if texts is None else texts[..., 1:]
        if not isinstance(labels, Tensor):
            rows = next(len(value) for value in batch.values() if isinstance(value, Tensor))
            return torch.ones(rows, dtype=torch.long)
        counted = labels.ne(-100)
        if texts is not None:
            groups = batch[self.gar.group_column]
            return torch.bincount(texts[counted & (texts >= 0)], minlength=len(groups))
        return counted.flatten(1).sum(1) if counted.dim() > 1 else counted.long()

    def item_weight(self, items: int, num_items_in_batch: Tensor | int | None) -> float | Tensor:
        """What a micro-batch's loss multiplies one of its ``items`` losses with; undone in group gradients.

        For losses as ``Trainer.compute_loss`` and ``SFTTrainer`` make them: a sum over
        ``num_items_in_batch``, else a mean, divided by the accumulation steps; or a mean that is not divided,
        of models that take the number and do not use it. Override it together with a ``compute_loss`` that
        weighs otherwise.
        """
        scaled = getattr(self, "loss_is_scaled_for_ga", None)
        if scaled is None:
            counted = self.model_accepts_loss_kwargs and num_items_in_batch is not None
            scaled = counted or self.compute_loss_func is not None
        if num_items_in_batch is None or not scaled:
            return 1 / max(1, items) / (1 if scaled else self.current_gradient_accumulation_steps)
        if self._is_mean:
            return self._loss_scale() / max(1, items)
        return self._loss_scale() / num_items_in_batch

    def _loss_scale(self) -> int:
        """What ``Trainer.compute_loss`` multiplies with, since DDP averages gradients."""
        processes: int = self.accelerator.num_processes
        return processes if self.args.average_tokens_across_devices else 1

    # -------------------------------------------------------------------------- checkpoints

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        if not self.is_fsdp_enabled:  # which has a file of its own, with all parameters by their names
            load_missing(self.model if model is None else model, resume_from_checkpoint)

    def _load_best_model(self) -> None:
        super()._load_best_model()
        if not self.is_fsdp_enabled:
            load_missing(self.model, self.state.best_model_checkpoint)

    # -------------------------------------------------------------------------- the update

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        options = self.gar
        if not options.observes:
            plain: Tensor = super().training_step(model, inputs, num_items_in_batch)
            return plain
        update = self._update
        if update is None or update.over:  # called by hand
            update = self._update = self._begin([inputs])
        inputs.pop(options.group_column, None)
        with self._watching_loss(), observe(self.model, gradients=options.aligns) as observed:
            loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        self._collect(update, observed, num_items_in_batch)
        if self.accelerator.sync_gradients:
            self._finish(update)
            self._update = None
        return loss

    @contextmanager
    def _watching_loss(self) -> Iterator[None]:
        """See whether a model that takes ``num_items_in_batch`` tells its loss: heads of classes do not."""
        self._is_mean, told = False, []
        model = self.accelerator.unwrap_model(self.model)
        model = model.get_base_model() if hasattr(model, "get_base_model") else model
        own = vars(model).get("_loss_function")
        # Where a model names no loss, transformers warns as soon as it is asked for.
        if not isinstance(model, PreTrainedModel) or (own is None and model.loss_type is None):
            yield
            return
        function = model.loss_function

        def watched(*args: Any, **keywords: Any) -> Any:
            told.append(keywords.get("num_items_in_batch") is not None)
            return function(*args, **keywords)

        model.loss_function = watched
        try:
            yield
        finally:
            if own is None:
                del model._loss_function
            else:
                model.loss_function = own
        self._is_mean = bool(told) and not any(told) and self.compute_loss_func is None

    def _scale(self) -> float:
        """What an fp16 gradient scaler multiplies losses with."""
        scaler = self.accelerator.scaler
        return 1.0 if scaler is None else float(scaler.get_scale())

    @torch.no_grad()
    def _collect(self, update: _Update, observed: Observed, num_items_in_batch: Tensor | int | None) -> None:
        """Keep what one micro-batch brings to the update."""
        options, sites, number = self.gar, observed.sites, len(update.passes)
        texts, own = update.texts[number], update.own[number][0]
        split = None if texts is None else Grouping(texts.flatten().cpu(), len(own))
        routings = [by_text(site.routing, split) for site in sites]
        groups = update.cut(self._group_size(update, sites))
        weight = self.item_weight(sum(update.own[number][1]), num_items_in_batch)
        items = torch.tensor(groups.items, device=getattr(weight, "device", None))
        items = items.to(torch.float32 if items.device.type == "mps" else torch.float64)
        members, weights = update.members[number], items * weight * self._scale()
        spread = members if texts is None else _of_tokens(members, texts)
        update.passes.append({place: sites[place] for place in self._chosen})
        update.splits.append(split)
        for place in self._chosen:
            site, routing = sites[place], routings[place]
            layer = update.layers.setdefault(place, self._empty(groups.count, routing))
            if layer.rows is not None and groups.count:
                layer.rows.add(site, spread.to(site.device), weights)
            gates, soft = self._sums(routing, members, groups.count)
            layer.gates += gates
            layer.soft += soft
            layer.chosen += routing.selected.flatten(0, -2).sum(0)
            layer.tokens += routing.selected.any(-1).sum()
            if layer.rows is not None and layer.rows.holds:
                for earlier in update.passes:
                    earlier[place].forget_factors()
        if options.statistics != "off":
            self._count_selections(own, routings)

    def _empty(self, groups: int, routing: Routing) -> _Layer:
        options, experts = self.gar, routing.gates.shape[-1]
        dtype = None if options.rows_dtype is None else getattr(torch, options.rows_dtype)
        rows = RowSum(groups, dtype, options.rows_device) if options.aligns else None
        shapes: tuple[tuple[int, ...], ...] = ((groups, experts), (experts,), (experts,), ())
        return _Layer(rows, *(routing.gates.new_zeros(shape) for shape in shapes))

    def _sums(self, routing: Routing, members: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Gates of each group's examples summed [M, E], and the softmax over all experts of all tokens, [E].

        What the options do not ask for is zero.
        """
        options, soft = self.gar, routing.gates.new_zeros(routing.gates.shape[-1])
        if options.balances or options.probabilities == "softmax":
            if not routing.logits.numel():
                raise UserError(
                    "the routers return no logits; a balance loss and probabilities='softmax' need them"
                )
            full = routing.soft()
            soft = full.gates.flatten(0, -2).sum(0)
            routing = full if options.probabilities == "softmax" else routing
        return Grouping(members, count).sum(routing.example_gates()), soft

    def _group_size(self, update: _Update, sites: Sequence[SiteObservation]) -> int:
        if self._ratio is None:
            # Without an exchange: a rank may have fewer micro-batches, and all meet in the last one.
            chosen = [sites[place] for place in self._chosen] or sites
            self._ratio = max(site.routing.gates.shape[-1] / site.choices for site in chosen)
        if self.gar.group_size is not None:
            return self.gar.group_size
        return automatic_size(update.size, self._ratio)

    def _finish(self, update: _Update) -> None:
        """Add the routers' gradient of the whole update, and note what it showed.

        Ranks exchange the sums of gates and the Gram matrix; each then back-propagates its own gates, and the
        routers' gradients are summed. Never a second ``backward``: DDP would average it.
        """
        options, groups, ranks = self.gar, update.groups, Ranks()
        assert groups is not None
        sum_tensors([part for layer in update.layers.values() for part in layer.sums], ranks)
        watched = self._expert_statistics if options.statistics != "off" else None
        terms = options.terms
        losses, kept, found = [], [], dict[nn.Parameter, Tensor]()
        for place, layer in update.layers.items():
            gates, soft = layer.gates.requires_grad_(), layer.soft.requires_grad_()
            loss = gates.new_zeros(())
            if layer.rows is not None and groups.count:
                gram = self._gram(update, layer.rows, ranks)
                total = gates.sum(1, keepdim=True)
                shares = gates / torch.where(total > 0, total, torch.ones_like(total))
                loss = self._strength() * self._objective(shares, gram, groups)
                if watched is not None:
                    kept.append(float(association(shares.detach(), gram=gram) / gram.trace()))
            if options.balances:
                pairs = (layer.chosen * soft).sum() / layer.tokens.square().clamp(min=1)
                loss = loss + options.balance_coefficient * len(soft) * pairs
            inner: list[Tensor] = []
            if loss.requires_grad:  # not in an update without a group
                grads = torch.autograd.grad(loss, (gates, soft), materialize_grads=True)
                inner = [self._scale() * grad for grad in grads]
            losses.append(loss.detach())
            if inner or terms:
                losses[-1] = losses[-1] + self._add_gradients(update, place, inner, terms, found)
        self._compared = True
        sum_tensors(list(found.values()), ranks)
        for parameter, grad in found.items():
            own = placed(grad, parameter)
            parameter.grad = own if parameter.grad is None else parameter.grad.add_(own)
        if options.aligns and groups.count <= (self._ratio or 0):
            self._warn_of_saturation(groups.count)
        if watched is not None:
            if losses:
                watched.add_value("gar/router_loss", sum(map(float, losses)))
            if kept:
                watched.add_value("gar/coherence", sum(kept) / len(kept))
                watched.add_value("gar/groups", groups.count)
            self._note_adapters(watched)

    def _gram(self, update: _Update, rows: RowSum, ranks: Ranks) -> Tensor:
        """The Gram matrix [M, M] of the groups of all ranks; each gives the rows of those that it has."""
        if ranks.count == 1:
            return rows.gram()
        assert update.groups is not None
        own, count = update.present[ranks.rank], update.groups.count
        # A rank may hold rows where another one, with less tokens, holds captures: they are cut alike.
        slices = evenly((part[own.to(part.device)] for part in rows.slices()), SLICE_BYTES // (8 * count))
        return global_gram(slices, Layout(tuple(update.present), count), ranks)

    def _objective(self, shares: Tensor, gram: Tensor, groups: Groups) -> Tensor:
        options = self.gar
        return alignment_loss(
            shares,
            gram=self._scaled(gram, groups),
            normalize=options.objective == "load_normalized",
            entropy_weight=options.entropy_weight,
            self_pairs=options.self_pairs,
        )

    def _strength(self) -> float:
        """The coefficient in this update; what a resumed training needs to go on is its own step count."""
        warmup = self.gar.warmup
        return self.gar.coefficient * (min(1.0, (self.state.global_step + 1) / warmup) if warmup else 1.0)

    def _scaled(self, gram: Tensor, groups: Groups) -> Tensor:
        """The Gram matrix of the rows as ``gradients`` asks for them; a zero row stays one."""
        if self.gar.gradients == "raw":
            return gram
        length = gram.diagonal().sqrt()
        if self.gar.gradients == "label_scale":
            labels, own = torch.tensor(groups.labels).unique(return_inverse=True)
            length = common_length(length, own.to(length.device), len(labels))
        if self.gar.gradients == "relative":
            length = gram.trace().sqrt().expand_as(length)
        length = torch.where(length > 0, length, torch.ones_like(length))
        return gram / length / length.unsqueeze(1)

    def _add_gradients(
        self,
        update: _Update,
        place: int,
        inner: Sequence[Tensor],
        terms: Sequence[RouterTerm],
        found: dict[nn.Parameter, Tensor],
    ) -> float | Tensor:
        """Bring the gradient at the sums of a layer's gates into its router, one micro-batch at a time.

        And that of the router losses ``terms``, whose sum is returned.
        """
        assert update.groups is not None
        router = update.passes[0][place].router
        whole = whole_parameters(router)
        parameters = {name: p for name, p in router.named_parameters() if p.requires_grad}
        leaves = [(whole or parameters)[name] for name in parameters]
        added: float | Tensor = 0.0
        layer, outer = None, list[Tensor]()
        if terms:
            observed = [by_text(each[place].routing, split)
                        for each, split in zip(update.passes, update.splits, strict=True)]  # fmt: skip
            layer = LayerSite(update.passes[0][place].name, observed, named(router, whole))
            loss = sum((term.coefficient * term.at(layer, _NOTHING) for term in terms), start=layer.zero)
            outer, own = layer.inner(loss, self._scale())
            added = loss.detach()
            for name, parameter in parameters.items():
                if name in own:  # every rank has all of it, and their sum is taken later
                    grad = own[name] if Ranks().rank == 0 else torch.zeros_like(own[name])
                    found[parameter] = found[parameter] + grad if parameter in found else grad
        for sites, split, members in zip(update.passes, update.splits, update.members, strict=True):
            routing = sites[place].detached_routing(whole, compare=not self._compared)
            routing = by_text(routing, split)
            sums = list(self._sums(routing, members, update.groups.count)) if inner else []
            sums += layer.sums(routing) if layer is not None else []
            pairs = zip(sums, (*inner, *outer), strict=True)
            used = [(total, grad) for total, grad in pairs if total.requires_grad]
            if not used:
                continue
            outputs, grads = zip(*used, strict=True)
            for parameter, grad in zip(
                parameters.values(),
                torch.autograd.grad(outputs, leaves, grads, allow_unused=True),
                strict=True,
            ):
                if grad is not None:
                    found[parameter] = found[parameter] + grad if parameter in found else grad
        return added

    def _warn_of_saturation(self, count: int) -> None:
        self._warn_once(
            "saturation",
            f"{count} groups in an update are not more than E/k = {self._ratio:g}: every group may have "
            "experts of its own, and nothing has to align; expected more examples an update "
            "(per_device_train_batch_size, gradient_accumulation_steps) or a smaller GARArguments.group_size",
        )

    def _warn_once(self, what: str, text: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            if self.is_world_process_zero():
                _log.warning(text)

    # -------------------------------------------------------------------------- statistics

    def _count_selections(self, labels: Sequence[int], routings: Sequence[Routing]) -> None:
        distinct = list(dict.fromkeys(labels))
        own = Grouping(torch.tensor([distinct.index(label) for label in labels]), len(distinct))
        assert self._expert_statistics is not None
        tables = []
        for routing in routings:
            chosen = routing.selected.long()
            tables.append(own.sum(chosen.flatten(1, -2).sum(1) if chosen.dim() > 2 else chosen))
        self._expert_statistics.add_selections(distinct, tables)

    def _note_adapters(self, statistics: ExpertStatistics) -> None:
        if not statistics.adapters:
            return
        now = reached(adapter_parameters(self.model))
        if self.is_fsdp_enabled:
            now = set().union(*Ranks().collect(now))
        statistics.reached |= now
        if not now:
            self._warn_once(
                "adapters",
                f"no gradient reached any of the {len(statistics.adapters)} adapters in update "
                f"{self.state.global_step + 1}: they do not learn (with gradient checkpointing, call "
                "model.enable_input_require_grads())",
            )

    def log(self, logs: dict[str, float], *args: Any, **keywords: Any) -> None:
        statistics = self._expert_statistics
        if statistics is not None and self.gar.statistics != "off" and "loss" in logs:
            statistics.join(gather_object([statistics.counts]))
            logs.update(statistics.logs(per_layer=self.gar.statistics == "layers"))
            statistics.reset()
        super().log(logs, *args, **keywords)

    def create_optimizer(self, *args: Any, **keywords: Any) -> Any:
        # A model made anew (model_init), or changed since, is looked at before its parameters are taken.
        self._look_at_model()
        optimizer = super().create_optimizer(*args, **keywords)
        if not self.is_fsdp_enabled:  # which puts other parameters in the place of these
            refuse_optimizer(optimizer, self._routers)
        return optimizer


class GARTrainer(GARMixin, transformers.Trainer):  # type: ignore[misc]
    """:class:`transformers.Trainer` with gradient-aligned routing; see :class:`GARMixin`."""

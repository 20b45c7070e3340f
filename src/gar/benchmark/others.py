"""The shipped loop beside other people's ways, on the same batches in the same run.

* The paper's way: a forward and backward for each group, and an autograd call for each group's gradient. That
  is the shipped loop too, with its reference path switched on.
* TorchJD's CAGrad with TorchJD's own engine (``torchjd.autojac``), inside of the shipped loop.
* ``transformers.Trainer`` without experts: with PEFT's LoRA on a frozen backbone, or with all weights.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from transformers import (
    AutoModelForSequenceClassification,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.utils import is_accelerate_available

from gar.benchmark.models import find_size
from gar.benchmark.report import Line, compared
from gar.benchmark.settings import Bench, Setting
from gar.benchmark.step import shipped
from gar.benchmark.timing import STRETCH, Plan, Runner, Shipped, measure, out_of_memory
from gar.config import Config
from gar.data.batches import Updates
from gar.errors import UserError
from gar.methods import CAGrad, Method, Pass, Update
from gar.model.backbone import DTYPES
from gar.training import TrainingFailure

REFERENCE = "gar: Baseline"
#: A pass holds at least one group, and one token leaves no room for a second.
GROUP_BY_GROUP = {"max_tokens_per_pass": 1, "capture": False}
INSTALL = "pip install 'gradient-aligned-routing[bench]'"
Maker = Callable[[Bench], Runner]


def other_lines(settings: Iterable[Setting], device: torch.device, plan: Plan) -> Iterator[list[Line]]:
    """Of one setting after the other, a line for everything that can be compared in it."""
    for setting in settings:
        makers = candidates(setting, device)
        labels = {name: {**setting.labels, "update": name} for name in makers}
        # Those that train the bench's own model; the others bring theirs.
        prepare = partial(Bench, setting, device, len(makers))
        yield compared(measure(prepare, makers, device, plan), labels, REFERENCE)


def candidates(setting: Setting, device: torch.device) -> dict[str, Maker]:
    """What can be compared in a setting, by the name in its line; ours are first."""
    found: dict[str, Maker] = {
        REFERENCE: partial(shipped, setting, "baseline", {}),
        "gar: GAR": partial(shipped, setting, "gar", {}),
        "gar: CAGrad": partial(shipped, setting, "cagrad", {}),
        "one group a pass: Baseline": partial(shipped, setting, "baseline", GROUP_BY_GROUP),
        "one group a pass: GAR, M autograd calls": partial(shipped, setting, "gar/per_group", GROUP_BY_GROUP),
        "one group a pass: CAGrad, M autograd calls": partial(shipped, setting, "cagrad", GROUP_BY_GROUP),
        "TorchJD: CAGrad, autojac": partial(_with_engine, setting, Engine()),
        "TorchJD: CAGrad, autojac row by row": partial(_with_engine, setting, Engine(rows_at_once=1)),
    }
    if setting.features == "trained":
        found["Trainer: all weights, no experts"] = partial(_trainer, setting, device, _unchanged)
    elif setting.features == "uncached":
        found["Trainer: PEFT LoRA at the last FFN"] = partial(_trainer, setting, device, _lora_at_last_ffn)
        found["Trainer: PEFT LoRA at its default layers"] = partial(_trainer, setting, device, _lora)
    return found


# ---------------------------------------------------------------------- TorchJD


class Engine(Method):
    """An aggregator of TorchJD on rows that ``torchjd.autojac`` makes of the groups' losses.

    Row m is scaled by ``M v_m``, as in :class:`gar.methods.CAGrad`. ``rows_at_once`` is torchjd's
    ``parallel_chunk_size``; without it all rows are one batched backward.
    """

    name: ClassVar[str] = "torchjd_engine"
    label: ClassVar[str] = "TorchJD's engine"
    aggregator: str = "CAGrad"
    options: dict[str, Any] = Field(default_factory=lambda: {"c": CAGrad().c})
    rows_at_once: int | None = None

    def build(self) -> Any:
        """The aggregator; raises :class:`~gar.errors.UserError` where a package is missing."""
        try:
            from torchjd import aggregation

            return getattr(aggregation, self.aggregator)(**self.options)
        except ImportError as error:
            raise UserError(f"not installed: {_first_line(error)}; {INSTALL}") from None

    def backward(self, pass_: Pass) -> None:
        """Nothing yet: the engine starts from all losses of the update."""
        scale = pass_.weights.total * pass_.weights.task_weights
        pass_.scratch.setdefault("losses", []).append(scale * pass_.losses)

    def finish(self, update: Update) -> None:
        from torchjd.autojac import backward, jac_to_grad

        losses: Tensor = torch.cat(update.scratch.pop("losses"))
        parameters = list(update.parameters)
        try:
            backward(losses, inputs=parameters, parallel_chunk_size=self.rows_at_once)
        except RuntimeError as error:
            if out_of_memory(error):
                raise
            raise UserError(f"torchjd.autojac cannot: {_first_line(error)}") from error
        jac_to_grad(parameters, self.build())


def _with_engine(setting: Setting, engine: Engine, bench: Bench) -> Runner:
    engine.build()
    config = setting.config().model_copy(update={"method": engine})
    return Shipped(bench.model, bench.source, config)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


# ---------------------------------------------------------------------- transformers.Trainer


class TrainerRunner:
    """``transformers.Trainer`` on a sequence classifier, fed with the batches that the shipped loop takes."""

    brings_model = True

    def __init__(self, model: nn.Module, bench: Bench, config: Config, device: torch.device) -> None:
        self.model, self.splits, self.config, self.device = model, bench.splits, config, device
        sizes = [len(split) for split in bench.splits]
        mixture = config.mixture
        self.schedule = Updates(
            list(bench.model.tasks), sizes, mixture.batch_size, mixture.group_size, config.seed
        )
        self.number = 0

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

    @property
    def stretch(self) -> int:
        return STRETCH.get(self.device.type, 1)

    def run(self, updates: int, watch: AbstractContextManager[Any]) -> None:
        """One ``train()``; an update before the watched ones takes in what a fresh trainer has to make."""
        numbers = [self.number, *range(self.number, self.number + updates)]
        optimizer = self.config.optimizer
        with tempfile.TemporaryDirectory() as scratch, _same_settings(self.config.precision):
            arguments = TrainingArguments(
                scratch,
                max_steps=len(numbers),
                per_device_train_batch_size=len(self.batch(self.number)),
                learning_rate=optimizer.learning_rate,
                weight_decay=optimizer.weight_decay,
                max_grad_norm=optimizer.clip,
                optim="adamw_torch_fused",
                bf16=self.config.precision == "bfloat16",
                use_cpu=self.device.type == "cpu",
                save_strategy="no",
                logging_strategy="no",
                logging_nan_inf_filter=False,
                report_to="none",
                disable_tqdm=True,
                remove_unused_columns=False,
                dataloader_pin_memory=False,
                seed=self.config.seed,
            )
            arguments._n_gpu = min(1, arguments.n_gpu)  # as the other lines: one device
            trainer = Trainer(
                self.model,
                arguments,
                data_collator=_padded,
                train_dataset=_Stream([example for number in numbers for example in self.batch(number)]),
                callbacks=[_Watching(watch, len(numbers))],
            )
            trainer.remove_callback(PrinterCallback)
            loss = trainer.train().training_loss
        self.number += updates
        if not math.isfinite(loss):
            raise TrainingFailure(f"the mean loss is {loss}", self.number)

    def batch(self, number: int) -> list[dict[str, Tensor]]:
        """The examples of update ``number``."""
        return [
            {
                "input_ids": torch.from_numpy(split.ids[split.offsets[i] : split.offsets[i + 1]]).long(),
                "labels": torch.tensor(split.labels[i]),
            }
            for group in self.schedule.groups(number)
            for split in [self.splits[group.task]]
            for i in group.examples
        ]


class _Stream(IterableDataset[dict[str, Tensor]]):
    """Examples in the order that they are given in."""

    def __init__(self, examples: Sequence[dict[str, Tensor]]) -> None:
        self.examples = examples

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter(self.examples)


def _padded(examples: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    ids = [example["input_ids"] for example in examples]
    ones = [torch.ones_like(row) for row in ids]
    return {
        "input_ids": nn.utils.rnn.pad_sequence(ids, batch_first=True),
        "attention_mask": nn.utils.rnn.pad_sequence(ones, batch_first=True),
        "labels": torch.stack([example["labels"] for example in examples]),
    }


class _Watching(TrainerCallback):  # type: ignore[misc]
    """Watches from the end of the first step to the end of the last: batches, steps and all between them."""

    def __init__(self, watch: AbstractContextManager[Any], steps: int) -> None:
        self.watch, self.steps = watch, steps

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            self.watch.__enter__()
        if state.global_step == self.steps:
            self.watch.__exit__(None, None, None)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What these libraries tell each other of their futures is not for the reader of a table."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


@contextlib.contextmanager
def _same_settings(precision: str) -> Iterator[None]:
    """Torch's generators and matrix products are afterwards as before; inside, products may be in TF32."""
    before = torch.get_float32_matmul_precision()
    with torch.random.fork_rng(), _quiet():
        torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)


def _trainer(
    setting: Setting, device: torch.device, adapted: Callable[[nn.Module], nn.Module], bench: Bench
) -> Runner:
    config = setting.config()
    architecture = find_size(setting.model).build()
    architecture.num_labels = max(len(task.labels) for task in bench.model.tasks.values())
    architecture.pad_token_id = 0
    architecture.use_cache = False
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(config.seed)
        model = AutoModelForSequenceClassification.from_config(
            architecture, dtype=DTYPES[config.backbone.dtype]
        )
    if not is_accelerate_available():
        raise UserError(f"not installed: accelerate, which transformers.Trainer needs; {INSTALL}")
    return TrainerRunner(adapted(model).to(device), bench, config, device)


def _unchanged(model: nn.Module) -> nn.Module:
    return model


def _lora(model: Any, modules: list[str] | None = None) -> nn.Module:
    """PEFT's adapters and a trained head on a frozen backbone; without ``modules`` where PEFT puts them."""
    try:
        import peft
    except ImportError:
        raise UserError(f"not installed: peft; {INSTALL}") from None
    experts = Config().experts
    adapters = peft.LoraConfig(
        task_type=peft.TaskType.SEQ_CLS,
        r=experts.rank,
        lora_alpha=experts.alpha,
        lora_dropout=experts.dropout,
        target_modules=modules,
    )
    with _quiet():
        adapted: nn.Module = peft.get_peft_model(model, adapters)
    return adapted


def _lora_at_last_ffn(model: Any) -> nn.Module:
    last = f".{model.config.num_hidden_layers - 1}."
    return _lora(
        model,
        [
            name
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and last in name and "att" not in name
        ],
    )

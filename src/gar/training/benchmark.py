"""Update times and peak memory, measured on models of real size with random weights.

Nothing is downloaded: architectures are written here as transformers configurations, texts are random tokens.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from gar.config import CacheConfig, Config
from gar.data.tokenize import TokenizedSplit
from gar.features import CachedSource, Features, RawSource, Source
from gar.methods import GAR, Baseline, Method
from gar.model.backbone import DTYPES, prepare
from gar.model.multitask import MultiTaskModel, TaskInfo, length_bucketed
from gar.seeds import derive_seed
from gar.training.updater import TrainingFailure, Updater


def _bert(hidden: int, layers: int, heads: int, inner: int) -> PreTrainedConfig:
    return transformers.BertConfig(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=inner
    )


def _qwen3(hidden: int, layers: int, heads: int, inner: int) -> PreTrainedConfig:
    return transformers.Qwen3Config(
        vocab_size=151936,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=inner,
        max_position_embeddings=40960,
    )


#: Sizes of the published models, by the hub id (lower case) or the name used here.
ARCHITECTURES: dict[str, Callable[[], PreTrainedConfig]] = {
    "minilm": lambda: _bert(384, 6, 12, 1536),
    "facebookai/roberta-base": lambda: transformers.RobertaConfig(
        vocab_size=50265, max_position_embeddings=514, type_vocab_size=1, layer_norm_eps=1e-5
    ),
    "microsoft/deberta-v3-base": lambda: transformers.DebertaV2Config(
        vocab_size=128100,
        type_vocab_size=0,
        hidden_size=768,
        num_hidden_layers=12,
        num_attention_heads=12,
        intermediate_size=3072,
        relative_attention=True,
        position_buckets=256,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
        pos_att_type=["p2c", "c2p"],
        position_biased_input=False,
        max_relative_positions=-1,
    ),
    "qwen/qwen3-1.7b": lambda: _qwen3(2048, 28, 16, 6144),
    "qwen/qwen3-8b": lambda: _qwen3(4096, 36, 32, 12288),
}


@dataclass(frozen=True)
class Timing:
    """One measured line: seconds are medians over ``repeats`` updates after one warm-up."""

    name: str
    seconds: float
    fastest: float
    slowest: float
    peak_gib: float | None
    finite: bool


def synthetic_model(
    config: Config, classes: Sequence[int], device: torch.device, backbone: PreTrainedModel | None = None
) -> MultiTaskModel:
    """The configured model on a backbone of the published size with random weights, or on a given one."""
    architecture = ARCHITECTURES[config.backbone.name.lower()]()
    vocabulary = {"[PAD]": 0, "[SEP]": 1} | {f"w{i}": i for i in range(2, 1000)}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="[PAD]"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]", sep_token="[SEP]")
    tasks = [TaskInfo(f"task{i}", tuple(map(str, range(n)))) for i, n in enumerate(classes)]
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(config.seed)
        if backbone is None:
            fresh = AutoModel.from_config(architecture, dtype=DTYPES[config.backbone.dtype])
            backbone = prepare(fresh, config.backbone)
        model = MultiTaskModel(backbone, tokenizer, tasks, config.experts, config.backbone, config.precision)
    return model.to(device)


def synthetic_splits(classes: Sequence[int], examples: int, length: int, seed: int) -> list[TokenizedSplit]:
    """Random tokens: lengths uniform between half of ``length`` and ``length``."""
    rng = np.random.Generator(np.random.PCG64(derive_seed(seed, "bench")))
    splits = []
    for n in classes:
        lengths = rng.integers(max(1, length // 2), length + 1, examples)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        ids = rng.integers(2, 1000, offsets[-1]).astype(np.int32)
        splits.append(TokenizedSplit(ids, offsets, None, rng.integers(0, n, examples)))
    return splits


def cached_source(model: MultiTaskModel, splits: Sequence[TokenizedSplit]) -> CachedSource:
    """Features of random-weight prefixes, in memory."""
    features = []
    for split in splits:
        x: torch.Tensor | None = None
        base: torch.Tensor | None = None
        with torch.no_grad():
            for rows in length_bucketed(split.lengths, 16384):
                state = model.prefix(*model.tokens([(split, rows)]))
                for row, i in enumerate(rows):
                    span = slice(split.offsets[i], split.offsets[i + 1])
                    width = span.stop - span.start
                    if state.x is not None:
                        x = _room(x, len(split.ids), state.x)
                        x[span] = state.x[row, :width]
                    if state.base.dim() == 2:
                        base = _room(base, len(split), state.base)
                        base[i] = state.base[row]
                    else:
                        base = _room(base, len(split.ids), state.base)
                        base[span] = state.base[row, :width]
        assert base is not None
        features.append(Features(split.offsets, x, base))
    return CachedSource(model, splits, features)


def _room(array: torch.Tensor | None, rows: int, like: torch.Tensor) -> torch.Tensor:
    return like.new_empty(rows, like.shape[-1]) if array is None else array


class Stepper:
    """Times whole updates of one model under one method."""

    def __init__(
        self, config: Config, model: MultiTaskModel, source: Source, method: Method, observation: str
    ) -> None:
        config = config.model_copy(update={"method": method, "observation": observation})
        self.updater = Updater(model, source, config, list(model.tasks))
        self.number = 0
        self.finite = True

    def step(self) -> float:
        """Seconds of one update."""
        device = self.updater.model.device
        _synchronize(device)
        began = time.perf_counter()
        try:
            self.updater.run(self.number)
        except TrainingFailure:
            self.finite = False
        _synchronize(device)
        self.number += 1
        return time.perf_counter() - began


def measure(steppers: dict[str, Stepper], repeats: int, warmup: int = 1) -> list[Timing]:
    """Median seconds of every stepper; they take turns, so that a slow spell hits all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in steppers}
    peaks: dict[str, float | None] = {}
    for turn in range(warmup + repeats):
        for name, stepper in steppers.items():
            device = stepper.updater.model.device
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            taken = stepper.step()
            if turn >= warmup:
                seconds[name].append(taken)
            if device.type == "cuda":
                peaks[name] = torch.cuda.max_memory_allocated(device) / 2**30
    return [
        Timing(name, median(seconds[name]), min(seconds[name]), max(seconds[name]), peaks.get(name), s.finite)
        for name, s in steppers.items()
    ]


def step_table(
    names: Iterable[str], device: torch.device, length: int, repeats: int, tasks: int = 5
) -> Iterator[tuple[str, str, list[Timing]]]:
    """(model, cached or uncached, timings) of Baseline and GAR with both observation paths."""
    classes = [2] * tasks
    methods: list[tuple[str, Method, str]] = [
        (Baseline.name, Baseline(), "one_pass"),
        ("gar one_pass", GAR(), "one_pass"),
        ("gar per_group", GAR(), "per_group"),
    ]
    for name in names:
        config = Config.model_validate({"backbone": {"name": name, "max_length": length}})
        model = synthetic_model(config, classes, device)
        splits = synthetic_splits(classes, 2 * config.mixture.batch_size, length, config.seed)
        sources: dict[str, Source] = {
            "cached": cached_source(model, splits),
            "uncached": RawSource(model, splits, CacheConfig()),
        }
        for kind, source in sources.items():
            steppers = {label: Stepper(config, model, source, method, how) for label, method, how in methods}
            yield name, kind, measure(steppers, repeats)


def machine(device: torch.device) -> str:
    """What the numbers were measured on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    return (
        f"device {name}, threads {torch.get_num_threads()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}, python {platform.python_version()}"
    )


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return "cpu"


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

"""What a trainer's own loading of a checkpoint leaves out."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel


@torch.no_grad()
def load_missing(model: nn.Module, directory: str | Path) -> None:
    """Load the parameters that a checkpoint of ``model`` has under other names: its experts, one by one.

    ``save_pretrained`` writes many MoE models in the layout of their hub checkpoints, and ``Trainer`` reads
    them back by name: after a resume the experts would be those of the model as it was given (issue 48805 of
    transformers). ``from_pretrained`` knows both layouts. The random stream stays where it is.
    """
    if not isinstance(model, PreTrainedModel) or getattr(model, "hf_quantizer", None) is not None:
        return
    saved: set[str] = set()
    for file in Path(directory).glob("model*.safetensors"):
        with safe_open(file, "pt") as opened:
            saved.update(opened.keys())
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    missing = {n: p for n, p in model.named_parameters() if n not in saved and n not in tied}
    if not (saved and missing):
        return
    dtype = next(iter(missing.values())).dtype
    with torch.random.fork_rng(devices=[]):
        loaded = type(model).from_pretrained(str(directory), dtype=dtype)
    found = dict(loaded.named_parameters())
    for name, parameter in missing.items():
        if name in found and found[name].shape == parameter.shape:
            parameter.copy_(found[name])

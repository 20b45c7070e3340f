"""Checkpoints: atomic, checksummed, the last few kept; never pickled.

``checkpoints/00000200/`` holds model.safetensors, optimizer.safetensors, method.safetensors where the method
keeps a state, and state.json; state.json carries the checksums of the others and its own, and the directory
is renamed into place when it is complete.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gar.distributed import Job
from gar.errors import UserError
from gar.methods import MethodState
from gar.model.multitask import MultiTaskModel
from gar.runs.directory import checkpoints
from gar.runs.files import checksum, checksum_of, sync

MODEL, OPTIMIZER, METHOD = "model.safetensors", "optimizer.safetensors", "method.safetensors"
STATE = "state.json"


def save(
    root: Path,
    update: int,
    model: MultiTaskModel,
    optimizer: torch.optim.Optimizer,
    facts: dict[str, Any],
    keep: int,
    kept: MethodState | None = None,
) -> Path:
    """Write the state after ``update`` updates; ``facts`` is JSON that comes back from :func:`load`.

    ``kept`` is what the method keeps (:meth:`gar.methods.Method.initial_state`).
    """
    target = root / f"{update:08d}"
    working = root / f".{update:08d}.partial"
    try:
        root.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(working, ignore_errors=True)
        working.mkdir()
        contents = {MODEL: model.owned_state(), OPTIMIZER: _optimizer_tensors(optimizer)}
        if own := state_tensors(kept):
            contents[METHOD] = {name: tensor.detach().clone().contiguous() for name, tensor in own.items()}
        for name, tensors in contents.items():
            save_file(tensors, working / name)
        files = {name: checksum(working / name) for name in contents}
        state = {"update": update, "facts": facts, "files": files}
        (working / STATE).write_text(json.dumps({**state, "digest": _digest(state)}), encoding="utf-8")
        for path in working.iterdir():
            sync(path)
        sync(working)
        shutil.rmtree(target, ignore_errors=True)
        os.replace(working, target)
        sync(root)
    except (OSError, SafetensorError) as error:  # safetensors wraps the system's errors in its own
        shutil.rmtree(working, ignore_errors=True)
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"{target}: the checkpoint could not be written ({reason}); earlier ones are kept"
        ) from error
    # Those after this update are damaged ones that were passed over: they must not count as kept.
    complete = [path for path in checkpoints(root) if path.name <= target.name]
    for old in {*checkpoints(root)} - {*complete[-keep:]}:
        shutil.rmtree(old, ignore_errors=True)
    return target


def load(
    root: Path,
    model: MultiTaskModel,
    optimizer: torch.optim.Optimizer,
    warn: Callable[[str], None],
    kept: MethodState | None = None,
) -> dict[str, Any] | None:
    """Restore the newest intact checkpoint; its ``{"update", "facts"}``, or None without any.

    ``kept``, what the method keeps, is filled in place. A damaged checkpoint is passed over with a line that
    says so, and so is the lack of any.
    """
    for path in reversed(checkpoints(root)):
        try:
            state = json.loads((path / STATE).read_text(encoding="utf-8"))
            digest = state.pop("digest")
            if digest != _digest(state):
                raise ValueError(f"the checksum of {STATE} differs")
            for name, expected in state["files"].items():
                if checksum(path / name) != expected:
                    raise ValueError(f"the checksum of {name} differs")
            tensors, moments = load_file(path / MODEL), load_file(path / OPTIMIZER)
            stored = load_file(path / METHOD) if METHOD in state["files"] else {}
            own = state_tensors(kept)
            if _shapes(stored) != _shapes(own):
                raise ValueError(f"{METHOD} holds {_shapes(stored)}, the method keeps {_shapes(own)}")
        except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
            warn(f"checkpoint {path} is damaged ({_told(error)}); trying the one before it")
            continue
        model.load_owned_state(tensors, str(path / MODEL))
        _restore(optimizer, moments)
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(stored[name])
        return {"update": state["update"], "facts": state["facts"]}
    warn(f"{root}: no intact checkpoint to continue from; training starts from the beginning")
    return None


def align(
    job: Job, model: MultiTaskModel, optimizer: torch.optim.Optimizer, kept: MethodState | None = None
) -> None:
    """Every rank takes what the first one has: weights, the optimizer's moments, what the method keeps.

    Weights that are not trained are compared: features were made with them already.
    """
    if job.count == 1:
        return
    frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad and p.numel()}
    if (place := job.differing([*frozen.values()])) is not None:
        raise UserError(
            f"{[*frozen][place]} is not trained and differs between the ranks; expected one backbone on all "
            "of them (the same directory or revision, or one seed for random weights)"
        )
    buffers = [buffer for buffer in model.buffers() if buffer.numel()]
    job.ranks.copy([*model.trainable_parameters(), *buffers, *state_tensors(kept).values()])
    moments = _optimizer_tensors(optimizer)
    shapes = job.told(lambda: {name: (t.shape, t.dtype, t.device.type) for name, t in moments.items()})
    if not job.is_first:
        device = {"cpu": torch.device("cpu")}
        moments = {
            name: torch.empty(shape, dtype=dtype, device=device.get(kind, model.device))
            for name, (shape, dtype, kind) in shapes.items()
        }
    job.ranks.copy(moments.values())
    if moments and not job.is_first:
        _restore(optimizer, moments)


def state_tensors(kept: MethodState | None) -> dict[str, Tensor]:
    """The tensors that a method keeps, by name, as they are (not copies); of several methods all of them."""
    if isinstance(kept, nn.Module):
        return dict(kept.state_dict(keep_vars=True))
    found: dict[str, Tensor] = {}
    for name, value in (kept or {}).items():
        own = {"": value} if isinstance(value, Tensor) else state_tensors(value)
        found |= {f"{name}.{key}" if key else name: tensor for key, tensor in own.items()}
    return found


def _shapes(tensors: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in sorted(tensors.items())}


def _told(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{Path(error.filename or '').name}: {error.strerror}"
    return str(error) if type(error) is ValueError else f"{STATE} cannot be read"


def _digest(state: dict[str, Any]) -> str:
    return checksum_of(json.dumps(state, sort_keys=True).encode())


def _optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"{index}.{name}": value.detach().clone().contiguous()
        for index, state in optimizer.state_dict()["state"].items()
        for name, value in state.items()
    }


def _restore(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    states: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        index, _, name = key.partition(".")
        states.setdefault(int(index), {})[name] = value
    optimizer.load_state_dict({"state": states, "param_groups": optimizer.state_dict()["param_groups"]})

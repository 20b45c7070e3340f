"""What GAR's router is told: trains, and writes the alignment gradient beside the task gradient as CSV."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
import typer
from torch import Tensor, nn
from torch.nn.functional import one_hot

from gar.benchmark.report import machine_line
from gar.cli.options import DataDirOption, DeviceOption, Overrides, configured
from gar.config import Config
from gar.errors import UserError
from gar.methods import GAR, Baseline, MethodState, Update
from gar.methods.gar import UPDATES
from gar.nn import expert_banks
from gar.objective import EPS, marginal_scores
from gar.runs.environment import computing_threads, resolve_device
from gar.training import Shared, Updater
from gar.training.captured_backbone import updates_of
from gar.training.gradients import total_norm
from gar.training.updater import ADAM_BETAS, ADAM_EPS

#: What a line says, each the mean over the updates since the line before; see docs/top4.md. "Pull" is what a
#: loss does to the router's weights: its gradient there.
COLUMNS = {
    "loss": "task loss",
    "clip": "factor of the clip",
    "task_norm": "length of the task loss's gradient at the router, before the clip",
    "pull_norm": "length of L_norm's gradient there, without the coefficient",
    "ratio": "coefficient * pull_norm / task_norm",
    "pull_cosine": "cosine between the two gradients",
    "step_share": "length of the alignment's part of AdamW's step over that of the whole step",
    "step_cosine": "cosine between AdamW's step and the one from the task's gradients alone",
    "task_memory": "length of AdamW's first moment of the task's gradients over the root of the second",
    "pull_memory": "likewise of the alignment's",
    "soft_unselected": "softmax probability of the experts that a token does not select",
    "pull_unselected": "share of L_norm's squared gradient at the logits that falls to them",
    "soft_norm": "pull_norm with p_m of the softmax over all experts in place of the gates",
    "soft_cosine": "cosine between that gradient and L_norm's",
    "entropy": "of p_m, over log E",
    "variation_same": "total variation distance of p_m between two groups of one task",
    "variation_other": "between groups of different tasks",
    "length": "mean length of g_m as it is",
    "cosine_same": "cosine of g_m between two groups of one task",
    "cosine_other": "of different tasks",
    "cosine_next": "of a task's mean g_m with that of the update before",
    "association": "-L_norm",
    "attained": "its place between all p_m equal (0) and an expert for each task (1)",
    "self_association": "share of the groups' pairs with themselves in the association",
    "distinct_norm": "pull_norm without these pairs",
    "distinct_cosine": "cosine between that gradient and L_norm's",
    "distinct_memory": "task_memory of that gradient",
    "contrast": "standard deviation of the scores s_mk over the experts, over their mean size",
    "leader_energy": "share of the task with most of it in sum |g_m|^2",
    "leader_association": "that task's share in the association",
    "leader_contrast": "and in the squared contrast, what pulls the router",
    "unit_cosine": "cosine between L_norm's gradient of the raw g_m and of g_m at length 1",
    "task_scale_cosine": "likewise at task_scale",
}
FACTS = ("arm", "seed", "update")
MOMENTS = ("task", "pull", "distinct")
STATE = (*MOMENTS, *(f"{name}_square" for name in MOMENTS), "square", "before", "total")


class Watched(GAR):
    """GAR, step by step the same, that adds up the numbers of :data:`COLUMNS` in its state."""

    name: ClassVar[str] = "watched"
    capturable: ClassVar[bool] = True
    clip: float
    """``optimizer.clip``: AdamW gets its gradients after it."""

    @classmethod
    def of(cls, config: Config) -> Watched:
        """The method of a configuration; Baseline is GAR with a coefficient of 0."""
        method = GAR(coefficient=0.0) if isinstance(config.method, Baseline) else config.method
        if type(method) is not GAR:
            raise UserError(f"method.name is {method.name}; expected gar or baseline")
        return cls(clip=config.optimizer.clip, **method.model_dump())

    @property
    def observes(self) -> frozenset[str]:
        return frozenset({"routing", "gradients"})

    def initial_state(self, model: nn.Module) -> MethodState:
        (bank,) = expert_banks(model)
        size = sum(p.numel() for p in bank.router.parameters())
        template = sum(shape.numel() for shape in bank.experts.template().values())
        sizes: dict[str, tuple[int, ...]] = dict.fromkeys(STATE, (size,))
        tasks = len(model.tasks)  # type: ignore[arg-type]
        sizes |= {"before": (tasks, template), "total": (len(COLUMNS) + tasks,)}
        state = {key: torch.zeros(shape, dtype=torch.float64) for key, shape in sizes.items()}
        state[UPDATES] = torch.zeros((), dtype=torch.int64)
        device = next(model.parameters()).device
        return {key: value.to(device) for key, value in state.items()}

    def finish(self, update: Update) -> None:
        (site,) = update.sites
        state, leaves = update.state, list(site.bank.router.parameters())
        own = [leaf.grad for leaf in leaves]
        task = _flat([torch.zeros_like(p) if g is None else g for p, g in zip(leaves, own, strict=True)])
        routings = [part.detached_routing() for part in site.parts]
        groupings = [part.weights.grouping for part in site.parts]

        def joined(routes: Iterable[Any]) -> Tensor:
            pairs = zip(groupings, routes, strict=True)
            return torch.cat([grouping.mean(routing.example_gates()) for grouping, routing in pairs])

        gates, soft = joined(routings), joined(routing.soft() for routing in routings)
        p = soft if self.probabilities == "softmax" else gates
        raw = site.gradients()
        rows = self.scaled(raw, update)

        def pulled(p: Tensor, rows: Tensor, *more: Tensor, method: GAR = self) -> tuple[Tensor, ...]:
            with torch.enable_grad():
                loss = method.loss(p, rows)
            return torch.autograd.grad(loss, [*leaves, *more], retain_graph=True, materialize_grads=True)

        of_router = pulled(p, rows, *(routing.logits for routing in routings))
        of_router, of_logits = of_router[: len(leaves)], of_router[len(leaves) :]
        pull = _flat(of_router)
        strength = self.strength(update)
        for leaf, gradient in zip(leaves, of_router, strict=True):
            leaf.grad = strength * gradient if leaf.grad is None else leaf.grad + strength * gradient
        norm = total_norm([p.grad for p in update.parameters if p.grad is not None]).double()
        clip = (self.clip / (norm + 1e-6)).clamp(max=1)

        with torch.no_grad():
            told = {"loss": _task_loss(update), "clip": clip}
            told |= {"task_norm": task.norm(), "pull_norm": pull.norm(), "pull_cosine": _cosine(task, pull)}
            told["ratio"] = _over(strength * pull.norm(), task.norm())
            distinct = _flat(pulled(p, rows, method=self.model_copy(update={"self_pairs": False})))
            told |= {"distinct_norm": distinct.norm(), "distinct_cosine": _cosine(distinct, pull)}
            told |= _steps(state, clip * task, clip * strength * pull, distinct)
            soft_pull = _flat(pulled(soft, rows))
            told |= {"soft_norm": soft_pull.norm(), "soft_cosine": _cosine(soft_pull, pull)}
            squares = [g.double().square() for g in of_logits]
            left = sum((q * ~r.selected).sum() for q, r in zip(squares, routings, strict=True))
            told["pull_unselected"] = _over(torch.as_tensor(left), sum(q.sum() for q in squares))
            chosen = sum((r.soft().gates * r.selected).sum().double() for r in routings)
            told["soft_unselected"] = 1 - _over(chosen, sum(r.soft().gates.sum().double() for r in routings))
            for name in ("unit", "task_scale"):
                like = self.model_copy(update={"gradients": name}).scaled(raw, update)
                told[f"{name}_cosine"] = _cosine(_flat(pulled(p, like)), _flat(pulled(p, raw)))
            of_tasks, lengths = _groups(p.double(), raw.double(), rows.double(), update)
            told |= of_tasks
            state["total"].add_(torch.cat([torch.stack([told[key].double() for key in COLUMNS]), lengths]))

    def taken(self, state: Any, updates: int) -> list[float]:
        """The means over the last ``updates`` updates; counting begins again."""
        means = (state["total"] / updates).tolist()
        state["total"].zero_()
        return list(means)


def _steps(state: Mapping[str, Tensor], task: Tensor, pull: Tensor, distinct: Tensor) -> dict[str, Tensor]:
    """AdamW's step in two parts: its first moment is linear in the gradients, the second is shared."""
    first, second = ADAM_BETAS
    number = state[UPDATES].double() + 1
    for name, value in zip(MOMENTS, (task, pull, distinct), strict=True):
        state[name].lerp_(value, 1 - first)
        state[f"{name}_square"].lerp_(value.square(), 1 - second)
    state["square"].lerp_((task + pull).square(), 1 - second)
    m, v = 1 - first**number, 1 - second**number

    def step(moment: str, square: str) -> Tensor:
        return state[moment] / m / ((state[square] / v).sqrt() + ADAM_EPS)

    def memory(name: str) -> Tensor:
        return _over((state[name] / m).norm(), (state[f"{name}_square"] / v).sum().sqrt())

    of_pull = step("pull", "square")
    whole = step("task", "square") + of_pull
    return {
        "step_share": _over(of_pull.norm(), whole.norm()),
        "step_cosine": _cosine(whole, step("task", "task_square")),
        **{f"{name}_memory": memory(name) for name in MOMENTS},
    }


def _groups(p: Tensor, raw: Tensor, rows: Tensor, update: Update) -> tuple[dict[str, Tensor], Tensor]:
    """What the groups of an update are like (``rows`` as the objective sees them); mean |g_m| by task."""
    state, member = update.state, one_hot(update.tasks, update.task_count).to(p)
    count = member.sum(0).clamp(min=1)
    same, alike = member @ member.T, torch.eye(len(p), dtype=p.dtype, device=p.device)

    def pairs(table: Tensor) -> tuple[Tensor, Tensor]:
        both = ((table * which).sum() / which.sum().clamp(min=1) for which in (same - alike, 1 - same))
        own, other = both
        return own, other

    variation = (p.unsqueeze(1) - p.unsqueeze(0)).abs().sum(-1) / 2
    lengths = raw.norm(dim=1)
    units = raw / torch.where(lengths > 0, lengths, 1).unsqueeze(1)
    means = (member.T @ raw) / count.unsqueeze(1)
    following = _over((means * state["before"]).sum(1), means.norm(dim=1) * state["before"].norm(dim=1))
    state["before"].copy_(means)

    load = p.sum(0) + EPS
    own = rows.square().sum(1, keepdim=True)
    gain = p * (rows @ (p.T @ rows).T) / load  # [M, E], sums to the association
    association = gain.sum()
    sums = member.T @ rows
    equal, apart = sums.sum(0).square().sum() / len(p), (sums.square().sum(1) / count).sum()
    scores = marginal_scores(p, rows)
    spread = scores.var(1, correction=0)
    energy, of_task, contrasts = (member.T @ each for each in (own.squeeze(1), gain.sum(1), spread))
    leader = one_hot(energy.argmax(), len(energy)).to(p)
    log = torch.where(p > 0, p, 1).log()
    variation_same, variation_other = pairs(variation)
    cosine_same, cosine_other = pairs(units @ units.T)
    return {
        "variation_same": variation_same,
        "variation_other": variation_other,
        "entropy": -(p * log).sum(1).mean() / math.log(max(2, p.shape[1])),
        "length": lengths.mean(),
        "cosine_same": cosine_same,
        "cosine_other": cosine_other,
        "cosine_next": following.mean(),
        "association": association,
        "attained": _over(association - equal, apart - equal),
        "self_association": _over(
            (p.square() / load * rows.square().sum(1, keepdim=True)).sum(), association
        ),
        "contrast": _over(spread.sqrt().mean(), scores.abs().mean()),
        "leader_energy": _over((leader * energy).sum(), energy.sum()),
        "leader_association": _over((leader * of_task).sum(), association),
        "leader_contrast": _over((leader * contrasts).sum(), contrasts.sum()),
    }, (member.T @ lengths) / count


def _task_loss(update: Update) -> Tensor:
    weights = torch.cat([each.weights.task_weights for each in update.passes])
    return (weights * update.losses).sum().double()


def _flat(gradients: Iterable[Tensor]) -> Tensor:
    return torch.cat([gradient.detach().flatten().double() for gradient in gradients])


def _over(a: Tensor | Any, b: Tensor | Any) -> Tensor:
    """``a / b``, and 0 where b is 0."""
    a, b = torch.as_tensor(a), torch.as_tensor(b)
    return torch.where(b != 0, a / torch.where(b != 0, b, 1), 0)


def _cosine(a: Tensor, b: Tensor) -> Tensor:
    return _over(a @ b, a.norm() * b.norm())


def watch(config: Config, shared: Shared, every: int) -> tuple[list[str], list[list[float]]]:
    """Train one configuration; the tasks' names, and per line the update and what :data:`COLUMNS` says."""
    method = Watched.of(config)
    config = config.model_copy(update={"method": method})
    begun = shared.start(config)
    names = [task.name for task in begun.mixture.tasks]
    begun.model.to(resolve_device(config.device))
    source, _ = begun.sources(None)
    updater = Updater(begun.model.train(), source, config, names)
    updates, lines = updates_of(updater), []
    for start in range(0, updater.total, every):
        stop = min(start + every, updater.total)
        for _ in updates.block(start, stop):
            pass
        lines.append([float(stop), *method.taken(updater.state, stop - start)])
    return names, lines


def finished(out: Path) -> set[tuple[str, str]]:
    """Arms and seeds that a file has already."""
    if not out.exists():
        return set()
    with out.open(newline="", encoding="utf-8") as file:
        return {(row["arm"], row["seed"]) for row in csv.DictReader(file)}


def append(out: Path, names: list[str], arm: str, seed: int, lines: list[list[float]]) -> None:
    """All lines of one run at once, so that a run is in the file whole or not at all."""
    head = [*FACTS, *COLUMNS, *(f"length {name}" for name in names)]
    fresh = not out.exists()
    if not fresh and out.read_text(encoding="utf-8").splitlines()[0] != ",".join(head):
        raise UserError(f"{out} has other columns; expected a file of the same tasks, or a new one")
    rows = [[arm, seed, int(update), *(f"{value:.6g}" for value in values)] for update, *values in lines]
    with out.open("a", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([head, *rows] if fresh else rows)


def main(
    what: Annotated[str, typer.Argument(metavar="FILE|MIXTURE", help="A YAML file, mixture or task.")],
    overrides: Overrides = None,
    arm: Annotated[
        list[str] | None, typer.Option(help="Overrides of one arm, with spaces between; may be repeated.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="0, 1, … of every arm.")] = 1,
    every: Annotated[int, typer.Option(min=1, help="Updates that a line is the mean of.")] = 50,
    data_dir: DataDirOption = None,
    device: DeviceOption = None,
    out: Annotated[Path, typer.Option(help="CSV; arms and seeds in it are not run again.")] = Path(
        "router_signal.csv"
    ),
) -> None:
    """Train GAR and write what its router is told: gradients, steps, group probabilities, dominance."""
    shared, done = Shared(), finished(out)
    for words in arm or [""]:
        base = configured(what, [*(overrides or []), *words.split()], data_dir=data_dir, device=device)
        print(f"{words or 'as given'}: {machine_line(resolve_device(base.device))}", flush=True)
        for seed in range(seeds):
            if (words, str(seed)) in done:
                continue
            with computing_threads(base.threads):
                names, lines = watch(base.override({"seed": seed}), shared, every)
            append(out, names, words, seed, lines)
            last = dict(zip(COLUMNS, lines[-1][1:], strict=False))
            shown = ("loss", "ratio", "step_share", "step_cosine", "variation_same", "variation_other")
            print(f"  seed {seed}: " + ", ".join(f"{key} {last[key]:.3g}" for key in shown), flush=True)


if __name__ == "__main__":
    typer.run(main)

"""Exchanges between ranks against one process that has everything."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gar.distributed import (
    Layout,
    Ranks,
    exchange,
    gather_probabilities,
    gather_rows,
    global_gram,
    sum_gradients,
    sum_tensors,
)
from gar.objective import alignment_loss
from support.ranks import Pool, pool

WORLD = 3


@pytest.fixture(scope="module")
def workers() -> Iterator[Pool]:
    with pool(WORLD) as found:
        yield found


def numbered(*numbers: list[int]) -> list[Tensor]:
    return [torch.tensor(own, dtype=torch.long) for own in numbers]


#: Numbers of the rows of every rank: whole groups in order and mixed up, an empty share, groups that are
#: spread over ranks, and twice on one; one rank alone.
LAYOUTS = {
    "whole": numbered([0, 1, 2], [3, 4]),
    "unordered": numbered([4, 0, 2], [3, 1]),
    "empty": numbered([0, 1, 2, 3], []),
    "nothing": numbered([], []),
    "spread": numbered([0, 1, 2], [1, 2, 3]),
    "twice": numbered([0, 1, 0, 2], [2, 2]),
    "three": numbered([0, 3], [], [1, 2, 4, 0]),
    "one": numbered([0, 2, 1]),
}


def rows_of(numbers: list[Tensor], width: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Rows of every rank, [m_r, width], of lengths from 1e-3 to 1e3."""
    random = torch.Generator().manual_seed(1)
    made = [torch.randn(len(own), width, generator=random, dtype=torch.float64) for own in numbers]
    return [(rows * 10.0 ** torch.linspace(-3, 3, len(rows)).unsqueeze(1)).to(dtype) for rows in made]


def whole_twin(numbers: list[Tensor], rows: list[Tensor], count: int) -> Tensor:
    """[M, d] in float64, by plain loops: parts of one row add up."""
    whole = torch.zeros(count, rows[0].shape[1], dtype=torch.float64)
    for own, parts in zip(numbers, rows, strict=True):
        for number, part in zip(own.tolist(), parts, strict=True):
            whole[number] += part.double()
    return whole


def same_everywhere(found: list[Any]) -> Any:
    """What every rank has, bit for bit."""
    for other in found[1:]:
        assert torch.equal(other, found[0])
    return found[0]


# ---------------------------------------------------------------------- the Gram matrix


def _gram(ranks: Ranks, numbers: list[Tensor], rows: list[Tensor], count: int, how: dict[str, Any]) -> Tensor:
    layout = Layout.agree(ranks, numbers[ranks.rank], count)
    assert [own.tolist() for own in layout.numbers] == [own.tolist() for own in numbers]
    own = rows[ranks.rank]
    pieces = how.pop("pieces", None)
    return global_gram(own if pieces is None else iter(own.split(pieces, 1)), layout, ranks, **how)


@pytest.mark.parametrize("width", [1, 2, 7, 40])
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_gram_matrix_is_that_of_all_rows(workers: Pool, name: str, width: int) -> None:
    numbers = LAYOUTS[name]
    rows, count = rows_of(numbers, width), 5
    whole = whole_twin(numbers, rows, count)
    for how in ({}, {"max_bytes": 1}, {"max_bytes": 320}, {"pieces": [width - width // 3, width // 3]}):
        found = same_everywhere(workers.run(len(numbers), _gram, numbers, rows, count, how))
        torch.testing.assert_close(found, whole @ whole.T, rtol=1e-13, atol=1e-9 if name != "nothing" else 0)


def test_half_precision_rows_are_multiplied_in_float32(workers: Pool) -> None:
    numbers = LAYOUTS["spread"]
    rows = rows_of(numbers, 40, torch.bfloat16)
    whole = whole_twin(numbers, rows, 4)
    found = same_everywhere(workers.run(2, _gram, numbers, rows, 4, {}))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), whole @ whole.T, rtol=1e-5, atol=1e-2)
    wide = same_everywhere(workers.run(2, _gram, numbers, rows, 4, {"dtype": torch.float64}))
    torch.testing.assert_close(wide, whole @ whole.T, rtol=1e-13, atol=1e-9)


def _agreed(ranks: Ranks, own: list[Any], count: int | None) -> tuple[list[list[int]], int]:
    layout = Layout.agree(ranks, own[ranks.rank], count)
    return [numbers.tolist() for numbers in layout.numbers], layout.count


def test_a_layout_is_agreed_on(workers: Pool) -> None:
    assert workers.run(3, _agreed, [2, 0, 3], None) == [([[0, 1], [], [2, 3, 4]], 5)] * 3
    assert workers.run(2, _agreed, numbered([7, 1], [1]), None) == [([[7, 1], [1]], 8)] * 2
    assert workers.run(2, _agreed, [0, 0], None) == [([[], []], 0)] * 2
    with pytest.raises(AssertionError, match=r"row numbers must lie in \[0, 5\), found 1 to 7"):
        workers.run(2, _agreed, numbered([7, 1], [1]), 5)


# ---------------------------------------------------------------------- probabilities


def _router_gradient(
    ranks: Ranks,
    numbers: list[Tensor],
    inputs: list[Tensor],
    weights: list[Tensor] | None,
    weight: Tensor,
    gram: Tensor,
) -> tuple[Tensor, Tensor]:
    """Gathered probabilities, and the router's gradient of the objective on them after the sum over ranks."""
    layout = Layout.agree(ranks, numbers[ranks.rank], len(gram))
    router = nn.Parameter(weight.clone())
    p = torch.softmax(inputs[ranks.rank] @ router, 1)
    own = None if weights is None else weights[ranks.rank]
    whole = gather_probabilities(p, layout, ranks, own)
    alignment_loss(whole, gram=gram).backward()
    sum_gradients([router], ranks)
    assert router.grad is not None
    return whole.detach(), router.grad


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "nothing"])
def test_the_routers_gradient_is_that_of_one_process(workers: Pool, name: str, weighted: bool) -> None:
    numbers, experts, width, count = LAYOUTS[name], 4, 3, 5
    inputs = rows_of(numbers, width)
    weights = None
    if weighted:
        weights = [torch.arange(len(own), dtype=torch.float64) + 1 + r for r, own in enumerate(numbers)]
    random = torch.Generator().manual_seed(2)
    weight = torch.randn(width, experts, generator=random, dtype=torch.float64)
    rows = torch.randn(count, 6, generator=random, dtype=torch.float64)

    router = weight.clone().requires_grad_()
    sums = [torch.zeros(experts, dtype=torch.float64) for _ in range(count)]
    total = [0.0] * count
    for r, own in enumerate(numbers):
        for i, number in enumerate(own.tolist()):
            w = 1.0 if weights is None else float(weights[r][i])
            sums[number] = sums[number] + w * torch.softmax(inputs[r][i] @ router, 0)
            total[number] += w
    twin = torch.stack([s / w if w else s for s, w in zip(sums, total, strict=True)])
    parts = [(twin[:, k] @ rows).square().sum() / (twin[:, k].sum() + 1e-8) for k in range(experts)]
    loss = -torch.stack(parts).sum()  # the objective, from its definition
    (expected,) = torch.autograd.grad(loss, router)

    found = workers.run(len(numbers), _router_gradient, numbers, inputs, weights, weight, rows @ rows.T)
    torch.testing.assert_close(same_everywhere([p for p, _ in found]), twin, rtol=1e-14, atol=1e-14)
    gradient = same_everywhere([grad for _, grad in found])
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


def _gathered(ranks: Ranks, numbers: list[Tensor], values: list[Tensor]) -> Tensor:
    layout = Layout.agree(ranks, numbers[ranks.rank], 5)
    return gather_rows(values[ranks.rank], layout, ranks)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16, torch.float32])
def test_rows_of_every_kind_are_gathered(workers: Pool, dtype: torch.dtype) -> None:
    numbers = LAYOUTS["unordered"]
    values = [own.unsqueeze(1).expand(-1, 2).gt(1).to(dtype) for own in numbers]
    found = same_everywhere(workers.run(2, _gathered, numbers, values))
    assert found.dtype == dtype
    assert found.tolist() == [[n > 1] * 2 for n in range(5)]


# ---------------------------------------------------------------------- sums


def _summed(ranks: Ranks, tensors: list[list[Tensor]], bucket: int) -> tuple[list[Tensor], int]:
    own = [tensor.clone() for tensor in tensors[ranks.rank]]
    sum_tensors(own, ranks, bucket)
    return own, ranks.bytes


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("bucket", [1, 64, 2**26])
def test_sums_have_the_same_bits_everywhere(workers: Pool, world: int, bucket: int) -> None:
    shapes: list[tuple[int, ...]] = [(3, 5), (), (7,), (0,), (2, 2, 2)]
    kinds = [torch.float32, torch.float64, torch.int64, torch.float32, torch.float64]
    random = torch.Generator().manual_seed(3)
    tensors = [
        [
            (100 * torch.randn(shape, generator=random)).to(kind)
            for shape, kind in zip(shapes, kinds, strict=True)
        ]
        for _ in range(world)
    ]
    found = workers.run(world, _summed, tensors, bucket)
    for i in range(len(shapes)):
        one = same_everywhere([own[i] for own, _ in found])
        twin = sum(of_rank[i].double() for of_rank in tensors)
        assert one.dtype == kinds[i]
        torch.testing.assert_close(one.double(), torch.as_tensor(twin), rtol=1e-6, atol=1e-4)


def test_half_precision_is_summed_in_float32(workers: Pool) -> None:
    # In bfloat16 256 + 1 is 256.
    tensors = [[torch.full((4,), value, dtype=torch.bfloat16)] for value in (256.0, 1.0, 1.0)]
    found = workers.run(3, _summed, tensors, 2**20)
    assert same_everywhere([own[0] for own, _ in found]).tolist() == [258.0] * 4


def test_what_is_sent_is_counted(workers: Pool) -> None:
    tensors = [[torch.zeros(300, dtype=torch.float32)] for _ in range(3)]
    for _, sent in workers.run(3, _summed, tensors, 2**20):
        assert sent == 2 * 2 * 100 * 4  # its share of 100 floats from and to two others
    for _, sent in workers.run(2, _summed, tensors, 2**20):
        assert sent == 300 * 4  # all of them to the other
    assert workers.run(1, _summed, tensors, 2**20)[0][1] == 0


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("used", [0, 5, 900, 8000])
def test_of_an_embedding_only_used_rows_travel(workers: Pool, world: int, used: int) -> None:
    size, width = exchange.VOCABULARY + 3, 4
    random = torch.Generator().manual_seed(used)
    tensors = []
    for rank in range(world):
        matrix = torch.zeros(size, width)
        if rank != 1:  # a rank that used none
            matrix[torch.randperm(size, generator=random)[:used]] = torch.randn(used, width, generator=random)
        tensors.append([torch.randn(7, generator=random), matrix, torch.randn(2, 3, generator=random)])
    tensors[0][1][1] = 0.0
    for of_rank in tensors[1:]:
        of_rank[1][1] = -0.0
    if used:
        tensors[0][1][0, 0] = float("nan")
        tensors[-1][1][-1, -1] = float("inf")
    found = workers.run(world, _summed, tensors, 2**20)
    for i in range(3):
        one = same_everywhere([own[i].view(torch.int32) for own, _ in found]).view(torch.float32)
        twin = tensors[0][i].clone()  # in the order of the ranks: the same bits as all rows would have
        for of_rank in tensors[1:]:
            twin += of_rank[i]
        assert torch.equal(one.nan_to_num(7.0), twin.nan_to_num(7.0))
    whole = 2 * (world - 1) * -(-tensors[0][1].nbytes // world)
    if world > 1:
        assert (found[0][1] < whole / 2) == (used < 1000)


def _gradients(ranks: Ranks, there: list[list[bool]]) -> list[list[float] | None]:
    parameters = [nn.Parameter(torch.zeros(2)) for _ in there[0]]
    for parameter, some in zip(parameters, there[ranks.rank], strict=True):
        parameter.grad = torch.full((2,), 1.0 + ranks.rank) if some else None
    sum_gradients(parameters, ranks)
    return [None if p.grad is None else p.grad.tolist() for p in parameters]


def test_a_missing_gradient_is_zero_and_stays_missing_where_all_miss_it(workers: Pool) -> None:
    found = workers.run(2, _gradients, [[True, False, False, True], [True, True, False, False]])
    assert found == [[[3.0, 3.0], [2.0, 2.0], None, [1.0, 1.0]]] * 2


# ---------------------------------------------------------------------- beside torch's own


def _second_backward(ranks: Ranks, rows: list[Tensor], weight: Tensor, gram: Tensor, ours: bool) -> Tensor:
    """The router's gradient; that of the objective by a second backward under DDP, or by ours."""
    own = rows[ranks.rank]
    router = nn.Linear(weight.shape[1], weight.shape[0], bias=False).double()
    with torch.no_grad():
        router.weight.copy_(weight)
    wrapped = nn.parallel.DistributedDataParallel(router, process_group=ranks.group)
    layout = Layout.agree(ranks, len(own))
    p = torch.softmax(wrapped(own), 1)
    p.square().sum().mul(ranks.count).backward()  # the task loss: a sum over all rows
    assert router.weight.grad is not None
    if ours:
        again = torch.softmax(router(own), 1)
        loss = alignment_loss(gather_probabilities(again, layout, ranks), gram=gram)
        (grad,) = torch.autograd.grad(loss, router.weight)
        sum_tensors([grad], ranks)
        router.weight.grad.add_(grad)
    else:
        first = sum(layout.sizes[: ranks.rank])
        block = slice(first, first + len(own))
        alignment_loss(torch.softmax(wrapped(own), 1), gram=gram[block, block]).backward()
    assert router.weight.grad is not None
    return router.weight.grad


def test_a_second_backward_under_ddp_is_wrong_and_ours_is_not(workers: Pool) -> None:
    random = torch.Generator().manual_seed(4)
    rows = [torch.randn(m, 3, generator=random, dtype=torch.float64) for m in (4, 2)]
    weight, g = (torch.randn(4, n, generator=random, dtype=torch.float64) for n in (3, 5))
    g = torch.cat([g, g[:2] + 0.1])
    router = weight.clone().requires_grad_()
    p = torch.softmax(torch.cat(rows) @ router.T, 1)
    (expected,) = torch.autograd.grad(p.square().sum() + alignment_loss(p, g), router)
    ours = same_everywhere(workers.run(2, _second_backward, rows, weight, g @ g.T, True))
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
    naive = workers.run(2, _second_backward, rows, weight, g @ g.T, False)[0]
    assert float((naive - expected).norm() / expected.norm()) > 0.05


def test_who_goes_on_after_an_error_can_be_ended() -> None:
    """The launcher's signal leaves time to say what happened, and ends the process after it."""
    script = """
import os, signal, sys, time
from gar.distributed import Job, Ranks, job
job.REASON = 1.0
alone = Job(Ranks.alone(), Ranks.alone())
alone.control.count = 2
try:
    with alone.explained():
        raise ValueError("handled")
except ValueError:
    os.kill(os.getpid(), signal.SIGTERM)
    print("said", flush=True)
    time.sleep(60)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=50, check=False
    )
    assert (done.stdout, done.returncode) == ("said\n", 143), done.stderr

"""Which examples an update takes, its groups and their weights, and how it is split into passes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gar.data import fixed_permutation
from gar.data.batches import Group, TaskOrder, Updates, passes, split
from gar.errors import UserError
from support import oracles

NAMES = ["large", "small", "tiny"]
SIZES = [70, 19, 5]


def updates(seed: int = 0, batch_size: int = 32, group_size: int = 8) -> Updates:
    return Updates(NAMES, SIZES, batch_size, group_size, seed)


def of_task(groups: list[Group], task: int) -> list[int]:
    return [int(i) for group in groups if group.task == task for i in group.examples]


def test_every_update_has_one_batch_of_every_task() -> None:
    for number in range(7):
        groups = updates().groups(number)
        assert {group.task for group in groups} == {0, 1, 2}
        assert [group.number for group in groups] == list(range(len(groups)))
        assert [group.task for group in groups] == sorted(group.task for group in groups)
        for task, size in enumerate(SIZES):
            assert len(of_task(groups, task)) <= min(32, size)


def test_an_epoch_has_every_example_once_and_keeps_its_short_last_batch() -> None:
    schedule = updates()
    batches = [of_task(schedule.groups(number), 0) for number in range(3)]
    assert [len(batch) for batch in batches] == [32, 32, 6]
    assert sorted(i for batch in batches for i in batch) == list(range(70))
    assert schedule.updates_per_epoch == 3


def test_small_tasks_start_new_epochs_on_their_own() -> None:
    schedule = updates()
    for task, size in ((1, 19), (2, 5)):
        epochs = [of_task(schedule.groups(number), task) for number in range(4)]
        assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) == 4, "every epoch has an order of its own"


def test_epochs_do_not_run_into_each_other() -> None:
    schedule = Updates(["a"], [10], 4, 2, 0)
    sizes = [len(of_task(schedule.groups(number), 0)) for number in range(6)]
    assert sizes == [4, 4, 2, 4, 4, 2]


def test_the_order_depends_on_seed_and_update_alone() -> None:
    forward = [[g.examples.tolist() for g in updates().groups(number)] for number in range(9)]
    schedule = updates()
    backward = [[g.examples.tolist() for g in schedule.groups(number)] for number in reversed(range(9))]
    assert forward == backward[::-1]
    assert [[g.examples.tolist() for g in updates(seed=1).groups(n)] for n in range(9)] != forward


def test_the_order_is_written_down() -> None:
    """No new numpy, and no release of ours, may move it: two runs of one seed see the same examples."""
    order = TaskOrder("rte", 6, 6, seed=3)
    assert order.batch(0).tolist() == [3, 2, 4, 0, 5, 1]
    assert order.batch(1).tolist() == [2, 5, 1, 3, 0, 4]
    assert order.batch(0).tolist() == fixed_permutation(6, "order/3/0/rte").tolist()


def test_tasks_of_one_size_have_orders_of_their_own() -> None:
    groups = Updates(["a", "b"], [40, 40], 32, 8, 0).groups(0)
    assert of_task(groups, 0) != of_task(groups, 1)


def test_a_task_keeps_its_order_whatever_the_others_are() -> None:
    alone = Updates(["small"], [19], 32, 8, 0).groups(3)
    assert of_task(alone, 0) == of_task(updates().groups(3), 1)


@pytest.mark.parametrize("number", range(5))
def test_groups_and_weights_are_those_of_the_specification(number: int) -> None:
    groups = updates().groups(number)
    batches = [len(of_task(groups, task)) for task in range(3)]
    expected = oracles.split_groups(batches, 8)
    assert [(group.task, len(group)) for group in groups] == expected
    assert [group.task_weight for group in groups] == pytest.approx(oracles.task_weights(expected), abs=1e-15)
    sizes = [size for _, size in expected]
    assert [group.sample_weight for group in groups] == pytest.approx(
        oracles.sample_weights(sizes), abs=1e-15
    )
    assert sum(group.task_weight for group in groups) == pytest.approx(1, abs=1e-12)


def test_groups_are_consecutive_parts_of_the_batch() -> None:
    groups = [group for group in updates().groups(0) if group.task == 0]
    order = of_task(groups, 0)
    assert [g.examples.tolist() for g in groups] == [order[i : i + 8] for i in range(0, 32, 8)]
    assert [part.tolist() for part in split(np.arange(5), 2)] == [[0, 1], [2, 3], [4]]


def test_a_task_without_examples_is_refused() -> None:
    with pytest.raises(UserError, match="task empty has no training examples"):
        Updates(["full", "empty"], [3, 0], 2, 2, 0)


# ---------------------------------------------------------------------- passes


def padded_tokens(part: list[Group], lengths: list[np.ndarray]) -> int:
    widest = max(int(lengths[group.task][group.examples].max()) for group in part)
    return widest * sum(len(group) for group in part)


@given(
    seed=st.integers(0, 1000),
    budget=st.one_of(st.none(), st.integers(1, 2000)),
    cost=st.sampled_from([0, 40, 512, 10**9]),
)
def test_passes_hold_every_group_once_in_order_within_the_budget(
    seed: int, budget: int | None, cost: int
) -> None:
    random = np.random.default_rng(seed)
    lengths = [random.integers(1, 60, size) for size in SIZES]
    groups = updates(seed).groups(seed % 5)
    parts = list(passes(groups, lengths, budget, cost))
    assert [group.number for part in parts for group in part] == [group.number for group in groups]
    for part in parts:
        assert part
        assert budget is None or len(part) == 1 or padded_tokens(part, lengths) <= budget


def test_without_limits_an_update_is_one_pass() -> None:
    lengths = [np.full(size, 7) for size in SIZES]
    groups = updates().groups(0)
    assert [len(part) for part in passes(groups, lengths, None, 0)] == [len(groups)]


def test_a_task_that_would_add_more_padding_than_a_pass_costs_runs_alone() -> None:
    lengths = [np.full(70, 50), np.full(19, 5), np.full(5, 5)]
    groups = updates().groups(0)
    assert [sorted({g.task for g in part}) for part in passes(groups, lengths, None, 100)] == [[0], [1, 2]]
    assert len(list(passes(groups, lengths, None, 10**6))) == 1


def test_a_group_larger_than_the_budget_runs_alone() -> None:
    lengths = [np.full(size, 50) for size in SIZES]
    parts = list(passes(updates().groups(0), lengths, 10))
    assert all(len(part) == 1 for part in parts)

"""Suites: what they expand to, and what they refuse."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from gar.errors import UserError
from gar.methods import from_config
from gar.sweeps.suite import CHECKPOINTING, Suite, build_suite, load_suite, shipped

METHODS, MIXTURES, TASKS, SEEDS = 7, 5, 5, 5
SHIPPED = {
    "paper_main": 3 * MIXTURES * METHODS * SEEDS,
    "paper_head": MIXTURES * METHODS * SEEDS,
    "paper_top1": 2 * MIXTURES * 3 * SEEDS,
    "paper_full_ffn": MIXTURES * 3 * SEEDS,
    "paper_qwen8b": MIXTURES * 3 * SEEDS,
    "paper_single_task": 2 * TASKS * 3 * SEEDS,
    "paper_sweep_lora_ffn": MIXTURES * 5 * SEEDS,
    "paper_sweep_head": MIXTURES * 5 * SEEDS,
    "paper_denominator": MIXTURES * 3 * SEEDS,
    "bigbench": 4 * METHODS * SEEDS,
    "evidence_top4": 2 * 20 * SEEDS,
}
EVIDENCE = {  # runs and seeds
    "evidence_frozen": (2 * 3 * METHODS * 10, 10),
    "evidence_table": (METHODS * 5 * 5, 5),
    "evidence_torchjd": (6 * 10, 10),
    "evidence_trained": (3 * 3 * 5, 5),
    "evidence_trained_ffn": (2 * 5, 5),
    "evidence_trained_others": (2 * 4 * 5, 5),
    "evidence_single": (2 * 5 * 3 * 5, 5),
    "evidence_coefficients": (2 * 7 * 10, 10),
    "evidence_denominator": (2 * 5 * 10, 10),
    "evidence_rates": (2 * 3 * 5 * 5, 5),
    "evidence_strong": (2 * 3 * 4 * 10, 10),
    "evidence_few": (2 * 3 * 10, 10),
    "evidence_alone": (2 * 11 * 5, 5),
    "evidence_pairs": ((55 + 11) * 3 * 4, 4),
    "evidence_roberta": (4 * 5 * 5, 5),
    "evidence_deberta": (4 * 5 * 5, 5),
}
PLANTED = {
    "planted": METHODS * SEEDS,
    "planted_top2": METHODS * SEEDS,
    "planted_ffn": METHODS * SEEDS,
    "planted_strength": 2 * 5 * METHODS * SEEDS,
    "planted_experts": 7 * METHODS * SEEDS,
    "planted_coefficient": 2 * 23 * SEEDS,
    "planted_methods": 13 * 2 * SEEDS,
}
INLINE = {
    "backbone": {"name": "somewhere/model"},
    "optimizer": {"learning_rate": 0.5},
    "mixture": {"batch_size": 4},
}


def suite(**tree: Any) -> Suite:
    return build_suite({"settings": {"own": INLINE}, **tree}, "test", Path.cwd())


def ids(found: Suite) -> list[str]:
    return [run.id for run in found.runs()]


def refusal(**tree: Any) -> str:
    with pytest.raises(UserError) as caught:
        suite(**tree)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_every_packaged_suite_is_known_here() -> None:
    assert set(shipped()) == set(SHIPPED) | set(EVIDENCE) | set(PLANTED)


@pytest.mark.parametrize("name", SHIPPED | PLANTED)
def test_packaged_suites_expand(name: str) -> None:
    found = load_suite(name)
    runs = list(found.runs())
    assert len(runs) == len(found) == (SHIPPED | PLANTED)[name]
    assert len({run.id for run in runs}) == len(runs)
    assert {run.seed for run in runs} == set(range(2 * SEEDS if name == "planted_methods" else SEEDS))
    for run in runs:
        tree = run.tree()  # a valid configuration
        assert tree["preset"] or name.startswith(("evidence", "planted"))
        assert tree["seed"] == run.seed
        assert re.fullmatch(r"[^/]+/[^/]+/[^/]+/seed-\d+", run.id)


@pytest.mark.parametrize("name", EVIDENCE)
def test_the_evidence_is_ordered_by_seed(name: str) -> None:
    """Whenever it is interrupted, all methods have the same seeds but for those of one."""
    found = load_suite(name)
    runs = list(found.runs())
    count, seeds = EVIDENCE[name]
    assert len(runs) == len(found) == len({run.id for run in runs}) == count
    first = runs[0].seed
    expected = sorted(first + seed for _ in range(count // seeds) for seed in range(seeds))
    assert [run.seed for run in runs] == expected
    for combination in {run.combination.id: run.combination for run in runs}.values():
        if combination.base["method"]["name"] == "torchjd":
            pytest.importorskip("quadprog")  # the extra [torchjd] brings it
        tree = combination.tree  # a valid configuration
        assert tree["mixture"]["batch_size"] in (16, 32)
        assert tree["mixture"]["max_validation_examples"] == 2000
        assert tree["backbone"]["max_length"] == 128


def test_runs_of_one_id_are_one_run_in_all_of_the_evidence() -> None:
    """Stored lines of all suites stand in one table."""
    digests: dict[str, set[str]] = {}
    for name in set(EVIDENCE) - {"evidence_torchjd"}:
        for combination in load_suite(name).combinations():
            digests.setdefault(combination.id, set()).add(combination.digest)
    assert all(len(found) == 1 for found in digests.values())
    assert len(load_suite("evidence_pairs").mixtures("pairs_top1")) == 66


def test_the_sweeps_vary_the_coefficient_alone() -> None:
    for name in ("paper_sweep_lora_ffn", "paper_sweep_head"):
        trees = {c.method: c.tree for c in load_suite(name).combinations() if c.mixture == "six"}
        coefficients = [tree["method"]["coefficient"] for tree in trees.values()]
        assert coefficients == [0, 1e-5, 1e-4, 1e-3, 1e-2]
        assert {tree["optimizer"]["updates"] for tree in trees.values()} == {1000}
        assert len({str({**tree, "method": 0, "preset": 0}) for tree in trees.values()}) == 1


def test_the_denominator_ablation_shares_its_other_arms_with_the_sweep() -> None:
    sweep = {c.id: c.digest for c in load_suite("paper_sweep_head").combinations()}
    arms = {c.id: c.digest for c in load_suite("paper_denominator").combinations()}
    own = {name for name in arms if name not in sweep}
    assert {name.rsplit("/", 1)[1] for name in own} == {"gar-1e-3-numerator"}
    assert all(sweep[name] == digest for name, digest in arms.items() if name not in own)


def test_single_tasks_train_for_epochs_on_one_task() -> None:
    for combination in load_suite("paper_single_task").combinations():
        assert len(combination.tree["mixture"]["tasks"]) == 1
        assert combination.tree["optimizer"]["epochs"] in (3, 5)


def test_an_inline_setting_gets_mixtures_methods_and_overrides() -> None:
    found = suite(
        mixtures=["five", "rte"],
        methods={"gar": "gar", "strong": {"name": "gar", "coefficient": 0.5}},
        seeds=[3, 1],
        set={"optimizer.updates": 7},
        overrides={"short": {"optimizer.updates": 2}, "plain": {}},
    )
    assert len(found) == 2 * 2 * 2 * 2
    assert ids(found)[:3] == [
        "own/five/gar-short/seed-3",
        "own/five/gar-short/seed-1",
        "own/five/gar-plain/seed-3",
    ]
    trees = {run.id: run.tree() for run in found.runs()}
    assert trees["own/rte/strong-plain/seed-1"]["method"] == {
        **from_config("gar").to_config(),
        "coefficient": 0.5,
    }
    assert trees["own/rte/gar-short/seed-1"]["mixture"]["tasks"] == ["rte"]
    assert trees["own/five/gar-short/seed-1"]["mixture"]["batch_size"] == 4
    assert trees["own/five/gar-short/seed-1"]["optimizer"]["updates"] == 2
    assert trees["own/five/gar-plain/seed-1"]["optimizer"]["updates"] == 7
    assert trees["own/five/gar-plain/seed-1"]["optimizer"]["learning_rate"] == 0.5


def test_presets_default_to_their_own_mixtures_and_methods() -> None:
    found = build_suite({"settings": ["paper/roberta_head_top1"]}, "test", Path.cwd())
    assert ids(found)[:4] == [f"roberta_head_top1/five/{m}/seed-0" for m in ("baseline", "cagrad", "gar")] + [
        "roberta_head_top1/six/baseline/seed-0"
    ]
    assert len(found) == 15


def test_a_setting_may_be_a_file_beside_the_suite(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(
        "mixture: {tasks: [{name: mood, train: a.csv, validation: b.csv}]}\n"
        "method: {name: gar, coefficient: 0.5}\n"
    )
    (tmp_path / "s.yaml").write_text(yaml.safe_dump({"settings": ["base.yaml"], "methods": ["gar", "stgc"]}))
    found = load_suite(tmp_path / "s.yaml", ["optimizer.updates=3"])
    trees = {run.id: run.tree() for run in found.runs()}
    assert list(trees) == ["base/mood/gar/seed-0", "base/mood/stgc/seed-0"]
    assert trees["base/mood/gar/seed-0"]["method"]["coefficient"] == 0.5
    assert trees["base/mood/stgc/seed-0"]["method"]["coefficient"] == 1.0
    assert trees["base/mood/gar/seed-0"]["mixture"]["tasks"][0]["train"] == str(tmp_path / "a.csv")
    assert trees["base/mood/gar/seed-0"]["optimizer"]["updates"] == 3


def test_mixtures_of_ones_own(tmp_path: Path) -> None:
    tasks = [{"name": "mood", "train": "a.csv", "validation": "b.csv"}]
    found = build_suite(
        {"settings": {"own": INLINE}, "mixtures": {"mine": {"tasks": tasks}}}, "test", tmp_path
    )
    mixture = next(found.runs()).tree()["mixture"]
    assert (mixture["name"], mixture["batch_size"]) == ("mine", 4)
    assert mixture["tasks"][0]["validation"] == str(tmp_path / "b.csv")


def test_runs_of_a_sweep_have_checkpoints_unless_told_otherwise() -> None:
    tree = next(suite(mixtures=["five"]).runs()).tree()["checkpoint"]
    assert {f"checkpoint.{key}": tree[key] for key in ("every", "pause")} == CHECKPOINTING
    for key, value in {"every": 0, "pause": 2.5}.items():
        told = next(suite(mixtures=["five"], set={f"checkpoint.{key}": value}).runs()).tree()["checkpoint"]
        assert told[key] == value


def test_the_digest_is_of_what_is_computed() -> None:
    def digest_with(**changes: Any) -> str:
        return next(suite(mixtures=["five"], set=changes).combinations()).digest

    plain = digest_with()
    assert digest_with(device="cpu") == digest_with(**{"checkpoint.every": 7}) == plain
    assert digest_with(**{"optimizer.updates": 7}) != plain


@pytest.mark.parametrize("setting", ["paper/roberta_head", INLINE])
def test_a_method_section_without_a_name_is_gar_as_in_a_configuration(setting: Any) -> None:
    methods = {"strong": {"coefficient": 0.5}, "gar": "gar"}
    found = suite(settings={"own": setting}, mixtures=["five"], methods=methods)
    strong, plain = found.combinations()
    assert strong.tree["method"] == {**plain.tree["method"], "coefficient": 0.5}
    assert strong.tree["optimizer"] == plain.tree["optimizer"]
    assert "unknown key 'method.coeficient' for method gar" in refusal(
        mixtures=["five"], methods={"own": {"coeficient": 1}}
    )


def test_refusals() -> None:
    assert "unknown key 'setings'; did you mean 'settings'?" in refusal(setings=1)
    assert "unknown name 'garr'" in refusal(mixtures=["five"], methods=["garr"])
    assert "'gar'" in refusal(mixtures=["five"], methods=["garr"])
    assert "'fife' is no file and no registered mixture or task; did you mean 'five'?" in refusal(
        mixtures=["fife"]
    )
    assert "seeds" in refusal(seeds=[0, 0])
    for seeds in (0, -1, 10**30, "012", [0, "1"], [-1], 1.5, None):
        assert "seeds: is" in refusal(seeds=seeds)
    assert "twice" in refusal(methods=["gar", "gar"])
    assert "becomes a directory" in refusal(overrides={"a/b": {}})
    assert "expected the suite's own key 'seeds'" in refusal(set={"seed": 3})
    assert "expected the suite's own key 'seeds'" in refusal(overrides={"x": {"seed": 3}})
    assert "unknown preset 'paper/roberta_head/nine/gar'" in refusal(
        settings=["paper/roberta_head"], mixtures=["nine"], methods=["gar"]
    )
    assert "missing key 'settings'" in _error({"methods": ["gar"]})
    assert "'paper/roberta_hed' is no file, preset" in refusal(settings=["paper/roberta_hed"])
    with pytest.raises(UserError, match="did you mean 'paper_head'"):
        load_suite("paper_hed")
    with pytest.raises(UserError, match="a suite has its own seeds"):
        load_suite("paper_head", ["seed=3"])


def _error(tree: dict[str, Any]) -> str:
    with pytest.raises(UserError) as caught:
        build_suite(tree, "test", Path.cwd())
    return str(caught.value)


# ---------------------------------------------------------------------- a part of a suite, chosen values


def test_restricted_to_some_names() -> None:
    found = suite(mixtures=["five", "six"], methods=["baseline", "gar"], seeds=2)
    part = found.restricted(mixtures=["six"], methods=["gar"])
    assert ids(part) == ["own/six/gar/seed-0", "own/six/gar/seed-1"]
    assert len(part) == 2
    assert part.name == "test,six,gar"  # its plan stands beside that of the whole
    assert ids(found.restricted()) == ids(found)
    with pytest.raises(UserError, match=r"--mixture.*'sixx'.*'six'"):
        found.restricted(mixtures=["sixx"])
    with pytest.raises(UserError, match="--method"):
        found.restricted(methods=["stgc"])


def test_seeds_are_the_outer_loop_where_asked() -> None:
    tree: dict[str, Any] = {"mixtures": ["five", "six"], "methods": ["baseline", "gar"], "seeds": 2}
    by_seed, usual = suite(order="seed", **tree), suite(**tree)
    assert sorted(ids(by_seed)) == sorted(ids(usual))
    assert [run.seed for run in by_seed.runs()] == [0] * 4 + [1] * 4
    assert {c.id: c.digest for c in by_seed.combinations()} == {c.id: c.digest for c in usual.combinations()}
    assert "order" in refusal(order="seeds")


def choose(directory: Path, place: str, method: str, rate: float, **fields: Any) -> None:
    path = directory / place / "chosen.yaml"
    path.parent.mkdir(parents=True)
    optimizer = {"learning_rate": rate, "clip": 0.7, "weight_decay": 0.04, "updates": 500}
    path.write_text(yaml.safe_dump({"method": {"name": method, **fields}, "optimizer": optimizer}))


def test_chosen_values_are_the_search_s_and_all_else_is_the_suite_s(tmp_path: Path) -> None:
    choose(tmp_path, "own/five/baseline", "baseline", 0.01)
    choose(tmp_path, "own/five/gar", "gar", 0.02, coefficient=0.005, objective="numerator_only")
    choose(tmp_path, "own/six/gar", "gar", 0.03, coefficient=0.006)
    methods = {"baseline": "baseline", "gar": "gar", "fixed": {"name": "gar", "coefficient": 0.5},
               "upgrad": {"name": "cagrad", "c": 0.25}}  # fmt: skip
    found = suite(
        mixtures=["five", "six"],
        methods=methods,
        set={"optimizer.updates": 7},
        chosen_from={"mixtures": {"six": "five"}, "methods": {"fixed": "gar", "upgrad": "baseline"}},
    ).with_chosen(tmp_path)
    trees = {c.id: c.tree for c in found.combinations()}
    rates = {name: tree["optimizer"]["learning_rate"] for name, tree in trees.items()}
    assert rates == {
        "own/five/baseline": 0.01, "own/five/gar": 0.02, "own/five/fixed": 0.02, "own/five/upgrad": 0.01,
        # six has a search of its own for GAR alone
        "own/six/baseline": 0.01, "own/six/gar": 0.03, "own/six/fixed": 0.03, "own/six/upgrad": 0.01,
    }  # fmt: skip
    for tree in trees.values():
        assert (tree["optimizer"]["clip"], tree["optimizer"]["weight_decay"]) == (0.7, 0.04)
        assert tree["optimizer"]["updates"] == 7
        assert tree["mixture"]["batch_size"] == 4
    assert trees["own/five/gar"]["method"]["coefficient"] == 0.005
    assert trees["own/five/gar"]["method"]["objective"] == "load_normalized"  # it is not searched
    assert trees["own/five/fixed"]["method"]["coefficient"] == 0.5
    assert trees["own/five/upgrad"]["method"]["c"] == 0.25
    won = found.replace({"optimizer.learning_rate": 0.9})
    assert {c.tree["optimizer"]["learning_rate"] for c in won.combinations()} == {0.9}


def test_a_missing_choice_is_said_before_anything_runs(tmp_path: Path) -> None:
    choose(tmp_path, "own/five/baseline", "baseline", 0.01)
    found = suite(mixtures=["five"], methods=["baseline", "gar", "stgc"])
    with pytest.raises(UserError, match=r"own/five/gar/chosen.yaml and 1 more; .*chosen_from"):
        found.with_chosen(tmp_path)
    part = found.restricted(methods=["baseline"]).with_chosen(tmp_path)
    assert [c.tree["optimizer"]["learning_rate"] for c in part.combinations()] == [0.01]
    (tmp_path / "own/five/baseline/chosen.yaml").write_text(
        "method: {name: baseline}\noptimizer: {clip: 1}\n"
    )
    with pytest.raises(UserError, match="learning_rate"):
        found.restricted(methods=["baseline"]).with_chosen(tmp_path)


def test_a_preset_with_chosen_values_is_no_preset(tmp_path: Path) -> None:
    choose(tmp_path, "roberta_head/five/gar", "gar", 0.02, coefficient=0.005)
    found = load_suite("paper_head").restricted(mixtures=["five"], methods=["gar"]).with_chosen(tmp_path)
    (combination,) = found.combinations()
    assert combination.tree["preset"] is None
    assert combination.tree["method"]["coefficient"] == 0.005

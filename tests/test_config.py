"""The configuration tree: YAML, overrides, and one line for each mistake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from gar import config
from gar.errors import UserError
from gar.methods import GAR, STGC


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_every_key_has_a_default_and_the_default_method_is_gar() -> None:
    assert config.build({}).method == GAR(coefficient=1e-3)
    assert config.build({"method": {"coefficient": 2e-3}}).method == GAR(coefficient=2e-3)


def test_the_tree_survives_yaml() -> None:
    built = config.build({"method": {"name": "stgc_load", "coefficient": 0.5}, "mixture": "five", "seed": 3})
    again = config.build(yaml.safe_load(yaml.safe_dump(built.to_dict())))
    assert again == built


@pytest.mark.parametrize("overrides", [["method.coefficient=3e-3", "method.name=stgc"], ["method=stgc"]])
def test_overrides_of_the_short_form(tmp_path: Path, overrides: list[str]) -> None:
    path = write(tmp_path / "a.yaml", "method: gar\nmixture: five\n")
    built = config.load(path, overrides)
    assert isinstance(built.method, STGC)
    assert config.load(path, ["mixture=six"]).mixture.name == "six"
    assert config.load(path, ["mixture.batch_size=16"]).mixture.batch_size == 16


def test_the_order_of_overrides_does_not_matter(tmp_path: Path) -> None:
    path = write(tmp_path / "a.yaml", "method: baseline\n")
    pair = ["method.coefficient=3e-3", "method.name=gar"]
    assert config.load(path, pair) == config.load(path, pair[::-1])
    assert config.load(path, pair).method == GAR(coefficient=3e-3)


def test_naming_another_method_drops_the_old_coefficients() -> None:
    built = config.build({"method": {"name": "gar", "coefficient": 0.5}})
    assert built.override(["method.name=stgc"]).method == STGC()
    assert built.override(["method.name=gar"]).method == GAR(coefficient=0.5)


def test_numbers_without_a_dot_are_numbers_and_quoted_ones_are_text(tmp_path: Path) -> None:
    path = write(tmp_path / "a.yaml", "optimizer: {learning_rate: 1e-3}\nbackbone: {revision: '12e4567'}\n")
    built = config.load(path)
    assert built.optimizer.learning_rate == 1e-3
    assert built.backbone.revision == "12e4567"


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    task = "{name: a, train: t.csv, validation: sub/v.csv}"
    built = config.load(write(tmp_path / "a.yaml", f"mixture: {{tasks: [{task}]}}\ndata_dir: d\n"))
    (own,) = built.mixture.tasks
    assert not isinstance(own, str)
    assert (own.train, own.validation) == (str(tmp_path / "t.csv"), str(tmp_path / "sub" / "v.csv"))
    assert built.data_dir == str(tmp_path / "d")


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"optimiser": {}}, r"unknown key 'optimiser'; did you mean 'optimizer'\?"),
        ({"experts": {"cout": 3}}, r"unknown key 'experts.cout'; did you mean 'count'\?"),
        (
            {"experts": {"site": "lora_fn"}},
            r"experts.site is 'lora_fn'; .*did you mean 'lora_ffn'\?",
        ),
        ({"experts": {"top_k": 9}}, r"experts.top_k is 9 but experts.count is 8"),
        (
            {"optimizer": {"updates": 0}},
            r"optimizer.updates is 0; input should be greater than or",
        ),
        ({"optimizer": {"clip": "x"}}, r"optimizer.clip is 'x'; input should be a valid number"),
        ({"mixture": {"tasks": [{"nam": "a"}]}}, r"mixture.tasks.0"),
        ({"method": {"name": "gr"}}, r"did you mean 'gar'\?"),
    ],
)
def test_mistakes_are_one_line_with_the_nearest_name(tree: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        config.build(tree, "x.yaml")
    assert str(caught.value).startswith("x.yaml: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [("a: [", "not valid YAML"), ("- 1\n", "expected a mapping"), ("a: 1\n  b: 2", "line 2")],
)
def test_files_that_are_no_configuration(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        config.load(write(tmp_path / "a.yaml", text))
    with pytest.raises(UserError, match=r"expected key.sub=value"):
        config.parse_overrides(["updates"])
    with pytest.raises(UserError, match=r"seed is a value, not a section"):
        config.build({}).override(["seed.x=1"])


def test_unquoted_booleans_as_label_names_are_explained() -> None:
    task = {"name": "a", "labels": [True, False]}
    with pytest.raises(UserError, match="expected quoted label names"):
        config.build({"mixture": {"tasks": [task]}})
    numbers = config.build({"mixture": {"tasks": [{"name": "a", "labels": [0, 1]}]}}).mixture.tasks[0]
    assert not isinstance(numbers, str)
    assert numbers.labels == ("0", "1")


def test_paths_of_overrides_are_those_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bert").mkdir()
    monkeypatch.chdir(tmp_path)
    found = config.parse_overrides(
        ["data_dir=data", "cache.directory=cache", "backbone.name=bert", "plugins=[a.py]", "seed=1"]
    )
    assert found == {
        "data_dir": str(tmp_path / "data"),
        "cache.directory": str(tmp_path / "cache"),
        "backbone.name": str(tmp_path / "bert"),
        "plugins": [str(tmp_path / "a.py")],
        "seed": 1,
    }
    hub = config.parse_overrides(["backbone.name=facebookai/roberta-base"])
    assert hub == {"backbone.name": "facebookai/roberta-base"}


@pytest.mark.parametrize("key", config.Config.model_fields)
@pytest.mark.parametrize("value", [5, -1, 1.5, True, None, "x", [], [1], [[1]], {}, {"a": 1}, {"name": 5}])
def test_whatever_stands_at_a_key_is_accepted_or_refused_in_one_line(key: str, value: Any) -> None:
    for overrides in ({}, {"method.name": "gar"}, {"mixture": "five"}):
        said = ""
        try:
            config.build(config.overridden({key: value}, overrides))
        except UserError as error:
            said = str(error)
        assert "\n" not in said

"""Methods of other papers, and several methods in one update: what the grids over all methods do not ask."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

from gar import config as configuration
from gar.cli.app import run as command_line
from gar.comparison.arms import make_arms
from gar.config import build
from gar.errors import UserError
from gar.methods import REGISTRY, Baseline, Method, from_config, label_of
from gar.model import MultiTaskModel
from gar.report.results import Results
from gar.runs.reading import read_run
from gar.sweeps.local import LocalExecutor
from gar.sweeps.search import (
    Budget,
    Coordinate,
    Wanted,
    search,
    search_method,
    side_by_side,
    space,
    sweeping,
)
from gar.sweeps.store import hold
from gar.sweeps.suite import build_suite
from gar.training import Hooks, Interrupted, checkpoint, train_from_config
from support import oracles
from support.made_up_runs import write_run
from support.sweeps import quiet, tiny_base, tiny_world, write_result
from support.tiny import Batch, Gradients, Tiny, make_batch, make_model, run_passes, update_gradients
from support.tiny_runs import make_config, same_bits

# --------------------------------------------------------------------------------------------------
# The twins by hand
# --------------------------------------------------------------------------------------------------


def test_the_terms_at_their_extremes() -> None:
    even = torch.zeros(4, 8, dtype=torch.float64)
    assert float(oracles.z_loss(even)) == pytest.approx(math.log(8) ** 2)
    first = torch.zeros(4, 8)
    first[:, 0] = 1
    assert float(oracles.global_balance(even, torch.ones(4, 8))) == pytest.approx(1)
    assert float(oracles.global_balance(50 * first, first)) == pytest.approx(8)
    private = torch.eye(2)
    assert float(oracles.task_information(private, [0, 1], [0.5, 0.5])) == pytest.approx(math.log(2))
    assert float(oracles.task_information(private, [0, 0], [0.5, 0.5])) == pytest.approx(0)
    assert float(oracles.task_information(even[:2] + 0.125, [0, 1], [0.5, 0.5])) == pytest.approx(0)
    assert float(oracles.simbal(torch.eye(3, 5))) == 0
    assert float(oracles.simbal(torch.zeros(3, 5))) == 3
    assert oracles.bias_step([0, 0, 0], torch.tensor([[1, 1, 0], [1, 0, 1]]), 0.5) == [-0.5, 0.5, 0.5]


def test_global_balance_does_not_see_how_a_batch_is_grouped_and_switchaux_does() -> None:
    model = make_model("lora_ffn")
    few, many = make_batch((8, 6), group_size=8), make_batch((8, 6), group_size=1)
    assert torch.equal(few.ids, many.ids)

    def added(name: str, batch: Batch) -> Tensor:
        config = {"name": name, "coefficient": 1.0}
        with_it, without = (update_gradients(model, batch, from_config(c)) for c in (config, "baseline"))
        return with_it["experts.router.weight"] - without["experts.router.weight"]

    for name, same in (("global_balance", True), ("zloss", True), ("switchaux", False)):
        assert torch.allclose(added(name, few), added(name, many), rtol=1e-9, atol=1e-12) == same, name


# --------------------------------------------------------------------------------------------------
# The bias of loss-free balancing
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("site", ["lora_ffn", "full_ffn", "lora_head"])
@pytest.mark.parametrize("top_k", [1, 2])
def test_the_bias_follows_the_load_of_the_whole_update(site: str, top_k: int) -> None:
    """Against the definition over three updates, whatever the passes, the order and the padding."""
    batch = make_batch()
    found = {}
    for case, given, split in (
        ("whole", batch, None),
        ("passes", batch, [2, 3]),
        ("order", batch.reordered([3, 0, 4, 2, 1]), None),
        ("padding", batch.padded(2 * batch.ids.shape[1]), None),
    ):
        model = make_model(site, top_k=top_k)
        method: Any = from_config({"name": "loss_free", "speed": 0.3})
        state = method.initial_state(model)
        for _ in range(3):
            update = run_passes(model, model, given, method, split=split, state=state)
            with torch.no_grad():
                method.after_step(update)
        found[case] = state["bias0"]
        assert state["bias0"] is model.bank.router.selection_bias
    bias = [0.0] * 3
    logits = routed(make_model(site, top_k=top_k), batch)
    for _ in range(3):
        chosen = oracles.selected(logits + torch.tensor(bias, dtype=torch.float64), top_k)
        bias = oracles.bias_step(bias, chosen, 0.3)
    assert any(bias)
    for case, value in found.items():
        torch.testing.assert_close(value.double(), torch.tensor(bias, dtype=torch.float64), msg=case)


def routed(model: Tiny, batch: Batch) -> Tensor:
    """Logits [N, E] of the valid units."""
    seen = []
    handle = model.bank.router.register_forward_hook(lambda *call: seen.append(call[-1].logits))
    with torch.no_grad():
        model(batch)
    handle.remove()
    (logits,) = seen
    return logits if logits.dim() == 2 else logits[batch.mask]


# --------------------------------------------------------------------------------------------------
# Several methods in one update
# --------------------------------------------------------------------------------------------------

TOGETHER = [
    ["gar", "switchaux"],
    ["gar", "zloss", "simbal", "loss_free"],
    ["gar", "stgc", "global_balance"],
    ["task_information", "loadpen"],
    ["cagrad", "switchaux", "zloss"],
    ["switchaux", "cagrad"],
    ["cagrad", "ortho_variance"],
]


def strong(name: str) -> dict[str, Any]:
    return {"coefficient": 0.3} if "coefficient" in REGISTRY[name].model_fields else {}


def together(names: list[str]) -> Method:
    first, *others = names
    return from_config({"name": first, **strong(first), "with": {name: strong(name) for name in others}})


@pytest.mark.parametrize("observation", ["one_pass", "per_group"])
@pytest.mark.parametrize("split", [None, [2, 3]], ids=str)
@pytest.mark.parametrize("site", ["lora_ffn", "lora_head"])
@pytest.mark.parametrize("names", TOGETHER, ids="+".join)
def test_terms_add_up(names: list[str], site: str, split: list[int] | None, observation: str) -> None:
    """The update of several methods is Baseline's and what each of them adds alone, to rounding."""
    model, batch = make_model(site, dropout=0.0), make_batch()

    def gradients(method: Method) -> Gradients:
        return update_gradients(model, batch, method, split=split, observation=observation)

    plain = gradients(Baseline())
    alone = [gradients(from_config({"name": name, **strong(name)})) for name in names]
    found = gradients(together(names))
    assert found.keys() == plain.keys()
    for name, grad in plain.items():
        expected = grad + sum(each[name] - grad for each in alone)
        torch.testing.assert_close(found[name], expected, rtol=1e-9, atol=1e-11, msg=name)
        assert found[name].shape == grad.shape
    assert max(float((found[n] - each[n]).abs().max()) for each in alone for n in plain) > 1e-4


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("gar+zloss", {"name": "gar+zloss", "coefficient": 1e-3, "with": {"zloss": {"coefficient": 1e-3}}}),
        ({"name": "gar", "with": "zloss"}, {"with": {"zloss": {"coefficient": 1e-3}}}),
        (
            {"name": "gar", "coefficient": 2, "with": ["zloss", "loss_free"]},
            {
                "name": "gar+zloss+loss_free",
                "coefficient": 2,
                "with": {"zloss": {"coefficient": 1e-3}, "loss_free": {"speed": 1e-3}},
            },
        ),
        (
            {"name": "gar+zloss", "with": {"zloss": {"coefficient": 5}}},
            {"with": {"zloss": {"coefficient": 5}}},
        ),
        ({"name": "gar", "with": {"simbal": None}}, {"with": {"simbal": {"coefficient": 1e-3}}}),
        ({"name": "gar", "with": None}, {"name": "gar", "coefficient": 1e-3}),
    ],
    ids=str,
)
def test_ways_to_write_several_methods(config: Any, expected: dict[str, Any]) -> None:
    built = build({"method": config})
    section = built.to_dict()["method"]
    assert expected.items() <= section.items()
    assert build(built.to_dict()) == built
    assert from_config(section) == built.method
    assert yaml.safe_load(yaml.safe_dump(built.to_dict())) == built.to_dict()


def test_overrides_of_several_methods() -> None:
    own = build({"method": {"name": "gar", "coefficient": 0.25}})

    def section(*overrides: str) -> dict[str, Any]:
        found = own.override(overrides).to_dict()["method"]
        return {key: found.get(key) for key in ("name", "coefficient", "with")}

    zloss = {"zloss": {"coefficient": 0.5}}
    assert section("method.with.zloss.coefficient=0.5") == {
        "name": "gar+zloss", "coefficient": 0.25, "with": zloss
    }  # fmt: skip
    assert section("method=gar+zloss", "method.with.zloss.coefficient=0.5") == {
        "name": "gar+zloss", "coefficient": 0.25, "with": zloss
    }  # fmt: skip
    assert section("method.with.zloss.coefficient=0.5", "method=gar+zloss+simbal")["with"] == {
        "zloss": {"coefficient": 0.5}, "simbal": {"coefficient": 1e-3}
    }  # fmt: skip
    own = own.override(["method.with.zloss.coefficient=0.5"])
    assert section("method=gar") == {"name": "gar", "coefficient": 0.25, "with": None}
    assert section("method=zloss") == {"name": "zloss", "coefficient": 0.5, "with": None}
    assert section("method=switchaux") == {"name": "switchaux", "coefficient": 1e-3, "with": None}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("gar+zlos", r"method\.name: unknown name 'zlos'.*did you mean 'zloss'"),
        ("gar+", "unknown name ''"),
        ("gar+gar", r"'gar\+gar': gar stands there twice"),
        ("gar+baseline", "baseline adds nothing to another"),
        ({"name": "gar", "with": {"gar": {}}}, r"method\.with names gar, which is the method itself"),
        ({"name": "gar", "with": {"zlos": {}}}, r"method\.with: unknown name 'zlos'"),
        ({"name": "gar", "with": 3}, r"method\.with is 3; expected names, or a mapping"),
        ({"name": "gar", "with": {"zloss": 0.1}}, r"method\.with is .*expected names, or a mapping"),
        ({"name": "gar", "with": {"zloss": {"coef": 1}}}, r"'method\.with\.zloss\.coef' for method zloss"),
        ({"name": "gar", "with": {"zloss": {"coefficient": -1}}}, r"method\.with\.zloss\.coefficient is -1"),
        ("gar+cagrad", r"gar reads the gradients of groups .* which cagrad replaces"),
        ("cagrad+torchjd", "cagrad and torchjd have a backward of their own"),
        (
            {"name": "task_information"},
            r"method\.name is task_information: there is one task only",
        ),
    ],
    ids=str,
)
def test_what_does_not_go_together_is_one_clear_line(config: Any, message: str) -> None:
    mixture = {"tasks": ["rte"], "batch_size": 32, "group_size": 8}
    with pytest.raises(UserError, match=message) as caught:
        build({"method": config, "mixture": mixture})
    assert "\n" not in str(caught.value)


def test_a_part_that_does_not_fit_says_its_name() -> None:
    with pytest.raises(UserError, match=r"method\.name is gar\+stgc: stgc: its conflict score"):
        build({"method": "gar+stgc", "experts": {"site": "full_ffn"}})


def test_what_several_methods_promise_is_what_all_do() -> None:
    assert from_config("gar+zloss").capturable
    assert from_config("gar+zloss").router_apart
    assert not from_config("gar+switchaux").router_apart, "switchaux reaches through the ordinary backward"
    mixed = from_config("cagrad+zloss")
    assert mixed.whole_gradients
    assert mixed.spreads
    assert not mixed.capturable or REGISTRY["cagrad"].capturable
    assert label_of("gar+zloss") == from_config("gar+zloss").label == "GAR + z-loss"


# --------------------------------------------------------------------------------------------------
# Runs
# --------------------------------------------------------------------------------------------------


def test_each_keeps_its_state_and_the_model_its_bias(tmp_path: Path) -> None:
    """Stopped and resumed to the last bit; the saved model chooses with the bias that it was trained to."""
    method = {"name": "gar+loss_free", "warmup": 4, "with": {"loss_free": {"speed": 0.5}}}
    config = make_config(tiny_world(), method=method, optimizer__updates=6)
    train_from_config(config, tmp_path / "whole")

    def stop(done: int, total: int, loss: float) -> None:
        if done == 3:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Interrupted):
        train_from_config(config, tmp_path / "run", hooks=Hooks(update=stop))
    kept = load_file(tmp_path / "run" / "checkpoints" / "00000003" / checkpoint.METHOD)
    assert set(kept) == {"gar.updates", "loss_free.bias0"}
    assert int(kept["gar.updates"]) == 3
    train_from_config(config, tmp_path / "run", resume=True)
    weights = [load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "run")]
    assert same_bits(*weights)
    model = MultiTaskModel.from_pretrained(tmp_path / "run" / "model")
    bias = model.bank.router.selection_bias
    assert bias is not None
    assert float(bias.abs().max()) >= 0.5
    texts = ["w1 w2", "w25 w11 w3"]
    found = model.predict_probabilities("mood", texts)
    whole = MultiTaskModel.from_pretrained(tmp_path / "whole" / "model")
    assert torch.equal(found, whole.predict_probabilities("mood", texts))
    bias.copy_(torch.tensor([-100.0, 0.0, 100.0]))
    assert not torch.equal(found, model.predict_probabilities("mood", texts)), (
        "it takes part in what is chosen"
    )


def test_a_run_and_its_report_call_several_methods_by_one_name(tmp_path: Path) -> None:
    sections: list[tuple[str, dict[str, Any]]] = [
        ("baseline", {}),
        ("gar", {"coefficient": 1e-3}),
        ("gar+zloss", {"coefficient": 1e-3, "with": {"zloss": {"coefficient": 0.01}}}),
        ("gar+zloss", {"coefficient": 1e-3, "with": {"zloss": {"coefficient": 0.1}}}),
    ]
    for seed in range(2):
        for number, (name, fields) in enumerate(sections):
            write_run(tmp_path, name, seed, fields=fields, name=f"{number}-{seed}")
    results = Results(read_run(path.parent) for path in tmp_path.rglob("result.json"))
    (setting,) = results.settings
    assert results.variants(setting) == [
        "Baseline",
        "GAR",
        "GAR + z-loss zloss.coefficient=0.01",
        "GAR + z-loss zloss.coefficient=0.1",
    ]


def test_a_comparison_takes_several_methods() -> None:
    config = build(tiny_base()).override(["method=gar", "method.coefficient=0.5"])
    arms = make_arms(config, "own", ["gar", "gar+zloss", "simbal"], 2)
    assert arms.labels == {
        "baseline": "Baseline", "gar": "GAR", "gar+zloss": "GAR + z-loss", "simbal": "SimBal"
    }  # fmt: skip
    assert arms.trees["gar+zloss"]["method"]["coefficient"] == 0.5, "its own method keeps its coefficient"
    with pytest.raises(UserError, match=r"--methods: unknown name 'zlos'"):
        make_arms(config, "own", ["gar+zlos"], 2)


# --------------------------------------------------------------------------------------------------
# The search
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "keys"),
    [
        ("zloss", {"learning_rate": None, "zloss.coefficient": "method.coefficient"}),
        ("loss_free", {"learning_rate": None, "loss_free.speed": "method.speed"}),
        ("global_balance", {"learning_rate": None, "global_balance.coefficient": "method.coefficient"}),
        ("task_information", {"learning_rate": None, "task_information.coefficient": "method.coefficient"}),
        ("simbal", {"learning_rate": None, "simbal.coefficient": "method.coefficient"}),
        (
            "gar+switchaux",
            {
                "learning_rate": None,
                "lambda_align": "method.coefficient",
                "alpha_switch": "method.with.switchaux.coefficient",
            },
        ),
        (
            "gar+loss_free",
            {
                "learning_rate": None,
                "lambda_align": "method.coefficient",
                "loss_free.speed": "method.with.loss_free.speed",
            },
        ),
    ],
)
def test_every_method_has_a_search_space(method: str, keys: dict[str, str | None]) -> None:
    where = space(method)
    assert [c.name for c in where.coordinates] == list(keys)
    assert where.inherited == ("grad_clip", "weight_decay")
    for name, key in keys.items():
        assert where.keys[name] == (key or "optimizer.learning_rate")
    own = from_config(method).to_config()
    for coordinate in where.coordinates[1:]:
        default: Any = own
        for part in where.keys[coordinate.name].split(".")[1:]:
            default = default[part]
        assert coordinate.low <= default <= coordinate.high


def test_a_method_without_ranges_is_not_searched() -> None:
    with pytest.raises(UserError, match=r"--method gar\+torchjd: torchjd has no ranges"):
        space("gar+torchjd")


def test_a_search_finds_the_values_of_several_methods_and_a_sweep_takes_them(tmp_path: Path) -> None:
    """By a made-up score with its peak at known values."""
    name = "gar+zloss"

    def score(tree: dict[str, Any]) -> float:
        method = tree["method"]
        if "with" not in method:
            return 0.5
        miss = math.log(method["coefficient"] / 0.01) ** 2
        return 0.9 - 0.01 * (miss + math.log(method["with"]["zloss"]["coefficient"] / 1e-4) ** 2)

    def measure(stage: Any) -> None:
        for run in stage.runs():
            write_result(tmp_path / run.id, score(run.tree()))

    def bases(method: str) -> dict[str, Any]:
        return configuration.build(tiny_base()).override([f"method={method}"]).to_dict()

    wanted = Wanted("own", "mood+nli", ["baseline", name], bases)
    *_, (_, found) = search([wanted], measure, tmp_path, budget=Budget(updates=3))
    assert found.method == name
    assert found.values["lambda_align"] == pytest.approx(0.01, rel=1.5)
    assert found.values["zloss.coefficient"] == pytest.approx(1e-4, rel=3)
    suite = build_suite(
        {"settings": {"own": tiny_base()}, "methods": [name], "mixtures": None}, "tiny", Path.cwd()
    ).with_chosen(tmp_path)
    (run,) = suite.runs()
    assert run.id == "own/mood+nli/gar+zloss/seed-0"
    chosen = run.tree()["method"]
    assert chosen["coefficient"] == found.values["lambda_align"]
    assert chosen["with"]["zloss"]["coefficient"] == found.values["zloss.coefficient"]


PLUGIN = '''
"""A penalty on large gates, which brings its range with it."""
from typing import ClassVar

from pydantic import Field

from gar.methods import Method, Range, register


@register
class Square(Method):
    name: ClassVar[str] = "square"
    label: ClassVar[str] = "Squared gates"
    ranges: ClassVar[dict[str, Range]] = {"strength": Range(0.1, 10.0)}
    strength: float = Field(1.0, ge=0)

    @property
    def observes(self):
        return frozenset({"routing"})

    def router_loss(self, update):
        return self.strength * sum(site.example_gates().square().sum() for site in update.sites)
'''


@pytest.mark.slow
def test_a_method_of_ones_own_is_searched_by_workers_swept_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone and together with GAR; every run in a process of its own that imports the module."""
    monkeypatch.setitem(REGISTRY, "square", Baseline)
    del REGISTRY["square"]
    (tmp_path / "own_methods.py").write_text(PLUGIN)
    (tmp_path / "own.yaml").write_text(
        yaml.safe_dump({**tiny_base(2), "plugins": ["own_methods"], "method": "square"})
    )
    config = configuration.load(tmp_path / "own.yaml")
    # Two values a coordinate and none nearby: what is tried is the protocol's business.
    monkeypatch.setattr(Coordinate, "grid", lambda self: [self.low, self.high])
    monkeypatch.setattr(Coordinate, "nearby", lambda self, best, *stream: (best, best))
    found = tmp_path / "search"
    with hold(found), LocalExecutor(1, tmp_path / "logs") as executor:
        measure = sweeping(found, executor, lambda: False, quiet())
        inherited = {"grad_clip": 1.0, "weight_decay": 0.01}
        going = search_method(
            config.to_dict(), found, "own", "mood+nli", inherited=inherited, budget=Budget(2, seeds=1)
        )
        ((_, chosen),) = side_by_side([going], measure)
    assert chosen.values["square.strength"] in (0.1, 10.0)
    assert sum(len(step.candidates) for step in chosen.steps) > 4
    suite = {"settings": ["own.yaml"], "methods": ["baseline", "square", "gar+square"], "seeds": 2}
    (tmp_path / "suite.yaml").write_text(yaml.safe_dump(suite))
    runs = tmp_path / "runs"
    assert command_line(["sweep", str(tmp_path / "suite.yaml"), "--out", str(runs), "--jobs", "1"]) == 0
    report = [sys.executable, "-c", "from gar.cli import main; main()", "report", str(runs)]
    subprocess.run([*report, "--out", str(tmp_path / "report")], check=True, cwd=tmp_path)
    page = (tmp_path / "report" / "report.html").read_text(encoding="utf-8")
    assert "Squared gates" in page
    assert "GAR + Squared gates" in page

"""Float32 products use TF32 where that is asked for, and nowhere else; what has to be exact stays exact."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, backends, nn

import gar
from gar import precision
from gar.evaluation import evaluate
from gar.features.sources import make_source, make_sources, prefix_facts
from gar.model import multitask
from gar.model.multitask import MultiTaskModel
from gar.nn import RoutedFFN
from gar.observation import _site, _units, observe
from gar.precision import computing_in, float32_products, full_precision, linear, matmul, precision_on
from gar.routing import Router
from gar.training import Updater, fit
from support import tiny_runs
from support.tiny_runs import make_config, same_bits, weights

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
TORCH: Any = backends
SWITCHES: dict[str, Any] = {
    "cuda": TORCH.cuda.matmul,
    "cpu": TORCH.mkldnn.matmul,
    "conv": TORCH.cudnn.conv,
    "rnn": TORCH.cudnn.rnn,
}


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    yield
    start()


def start() -> None:
    """Torch's switches as a process begins with them."""
    TORCH.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    SWITCHES["cuda"].fp32_precision = "none"
    SWITCHES["cpu"].fp32_precision = "none"
    backends.cudnn.allow_tf32 = True


def switches() -> dict[str, str]:
    return {name: switch.fp32_precision for name, switch in SWITCHES.items()}


def older() -> str:
    try:
        return f"{torch.get_float32_matmul_precision()} {backends.cudnn.allow_tf32}"
    except RuntimeError:
        return "torch does not say"


def of_the_user(what: str) -> None:
    """A program's own setting, by the older and by the newer way."""
    start()
    if what in ("high", "medium"):
        torch.set_float32_matmul_precision(what)
    elif what == "all":
        TORCH.fp32_precision = "tf32"
    elif what == "cuda":
        SWITCHES["cuda"].fp32_precision = "tf32"
    elif what == "conv":
        SWITCHES["conv"].fp32_precision = "ieee"


SETTINGS = ("none", "high", "medium", "all", "cuda", "conv")
WHOLE = ("none", "ieee")


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_switches_hold_for_a_block_and_are_put_back(setting: str, device: torch.device) -> None:
    of_the_user(setting)
    before = switches(), older()
    with float32_products(device):
        assert switches()[device.type] in WHOLE
        if device.type == "cuda":
            assert switches()["conv"] in WHOLE
            assert switches()["rnn"] in WHOLE
        with float32_products(device, tf32=True):
            assert (switches()[device.type] == "tf32") == (device.type == "cuda")
            with full_precision(device):
                assert switches()[device.type] in WHOLE
        assert switches()[device.type] in WHOLE
    assert (switches(), older()) == before
    with pytest.raises(KeyError), float32_products(device, tf32=True):
        raise KeyError
    assert (switches(), older()) == before


def test_nothing_is_touched_where_nothing_has_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(value: str) -> None:
        raise AssertionError("set")

    monkeypatch.setattr(torch, "set_float32_matmul_precision", refuse)
    with float32_products(CPU), full_precision(CPU), computing_in(CPU, "tf32"):
        pass


def test_tf32_needs_a_device_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [precision_on(CPU, name) for name in precision.PRECISIONS] == ["float32", "float32", "bfloat16"]
    for capability, expected in (((7, 5), "float32"), ((8, 0), "tf32"), ((9, 0), "tf32")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert precision_on(CUDA, "tf32") == expected


# ---------------------------------------------------------------------- products that are exact in both ways


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which switches exact products run under, with TF32 allowed around them; on a CPU too."""
    torch.set_float32_matmul_precision("high")
    seen: list[str] = []
    original = precision.full_precision

    def watched(device: torch.device) -> Any:
        context = original(device)

        class Watched:
            def __enter__(self) -> None:
                context.__enter__()
                seen.append(switches()["cpu"])

            def __exit__(self, *error: Any) -> None:
                context.__exit__(*error)

        return Watched()

    monkeypatch.setattr(precision, "full_precision", watched)
    return seen


def test_the_products_and_their_derivatives(told: list[str]) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(4, 3, dtype=torch.float64), torch.randn(3, 5, dtype=torch.float64)
    x, weight, bias = (torch.randn(*shape, dtype=torch.float64) for shape in ((2, 4, 3), (5, 3), (5,)))
    for t in (a, b, x, weight, bias):
        t.requires_grad_()
    assert torch.allclose(matmul(a, b), a @ b, rtol=0, atol=1e-15)
    assert torch.allclose(linear(x, weight, bias), nn.functional.linear(x, weight, bias), rtol=0, atol=1e-15)
    assert set(told) == {"ieee"}
    torch.autograd.gradcheck(matmul, (a, b))
    torch.autograd.gradgradcheck(matmul, (a, b))
    torch.autograd.gradcheck(linear, (x, weight, bias))
    assert set(told) == {"ieee"}
    many = torch.randn(6, 4, 3, dtype=torch.float64)
    torch.testing.assert_close(torch.func.vmap(matmul, (0, None))(many, b), many @ b)


def test_router_and_objective_are_exact_whatever_is_allowed(told: list[str]) -> None:
    """Forward and backward, each time that one of their products runs."""
    torch.manual_seed(0)
    router = Router(6, 4, 2)
    routing = router(torch.randn(8, 6, requires_grad=True))
    assert told == ["ieee"]
    routing.logits.sum().backward()
    assert told == ["ieee"] * 2
    p = routing.gates.detach().requires_grad_()
    observations: list[dict[str, Any]] = [{"gradients": torch.randn(8, 7)}, {"gram": torch.eye(8)}]
    for options in observations:
        told.clear()
        gar.alignment_loss(p, **options).backward()
        assert told
        assert set(told) == {"ieee"}


def test_group_gradients_are_exact_whatever_is_allowed(
    told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    original = torch.bmm

    def bmm(*args: Any, **options: Any) -> Tensor:
        seen.append(switches()["cpu"])
        return original(*args, **options)

    def pairs(*args: Any) -> None:
        seen.append(switches()["cpu"])
        add_pairs(*args)

    add_pairs = _units.add_pairs
    monkeypatch.setattr(torch, "bmm", bmm)
    monkeypatch.setattr(_site, "add_pairs", pairs)
    bank = RoutedFFN(8, 16, experts=4, top_k=2)
    for size, products in ((1, 2), (6, 2)):  # of pairs of units, and of the rows' slices
        seen.clear()
        groups, weight = torch.arange(6) // size, torch.ones(6) / size
        with observe(bank) as observed:
            losses = bank(torch.randn(6, 8))[0].square().sum(1)
            (losses * weight).sum().backward()
            observed.group_gradients(groups, weight)
            assert len(seen) == 2
            observed.group_gram(groups, weight)
        assert len(seen) == 2 + products
        assert set(seen) == {"ieee"}


# ---------------------------------------------------------------------- one precision on every path


class Noting(nn.Module):
    """An activation that says under which switches it runs, forward and backward."""

    def __init__(self, seen: list[tuple[str, str]]) -> None:
        super().__init__()
        self.seen = seen

    def forward(self, x: Tensor) -> Tensor:
        seen = self.seen

        class Note(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                seen.append(("forward", switches()["cpu"]))
                return x.clone()

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> Tensor:
                seen.append(("backward", switches()["cpu"]))
                return grad

        return Note.apply(nn.functional.gelu(x))


def noting(model: MultiTaskModel) -> list[tuple[str, str]]:
    """Notes of the activations in the backbone (the frozen prefix) and in the experts."""
    seen: list[tuple[str, str]] = []
    for module in model.modules():
        if hasattr(module, "intermediate_act_fn"):
            module.intermediate_act_fn = Noting(seen)
    model.bank.experts.hidden_module.activation = Noting(seen)
    return seen


@pytest.mark.parametrize("trainable", [False, True])
def test_no_path_lets_a_program_s_own_setting_in(world: Path, trainable: bool) -> None:
    config = make_config(
        world,
        method__name="gar",
        experts__site="full_ffn",
        backbone__trainable=trainable,
        cache__enabled=False,
    )
    model, mixture = tiny_runs.load(config)
    seen = noting(model)
    torch.set_float32_matmul_precision("medium")
    paths: dict[str, Callable[[], Any]] = {
        "features": lambda: make_source(model, [mixture.tasks[0].train], config.cache).state([(0, [0, 1])]),  # type: ignore[list-item]
        "training": lambda: fit(model, mixture, config),
        "evaluation": lambda: evaluate(model, mixture, cache=config.cache),
        "prediction": lambda: model.predict("mood", ["w1 w2"]),
    }
    for name, run in paths.items():
        seen.clear()
        run()
        kinds = {kind for kind, _ in seen}
        assert kinds == ({"forward", "backward"} if name in ("training", "evaluation") else {"forward"}), name
        assert {switch for _, switch in seen} <= set(WHOLE), name
    assert torch.get_float32_matmul_precision() == "medium"


@pytest.mark.parametrize("name", ["float32", "tf32", "bfloat16"])
def test_every_path_has_the_model_s_precision(
    world: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Prefix and suffix each enter it, and every backward asks for its products."""
    entered: list[str] = []
    original = computing_in

    def watched(device: torch.device, precision: str) -> Any:
        entered.append(precision)
        return original(device, precision)

    monkeypatch.setattr(multitask, "computing_in", watched)
    config = make_config(world, precision=name, cache__enabled=False)
    model, mixture = tiny_runs.load(config)
    source, validation = make_sources(model, mixture, config.cache)
    updater = Updater(model.train(), source, config, ["mood", "nli"])
    for run, passes in (
        (lambda: source.state([(0, torch.arange(2).numpy())]), 1),
        (lambda: updater.gradients(updater.schedule.groups(0), 0), 2),
        (lambda: model.predict("mood", ["w1"]), 2),
    ):
        entered.clear()
        run()
        assert entered == [name] * passes
    evaluate(model, mixture, source=validation)
    assert set(entered) == {name}
    assert prefix_facts(model)["precision"] == name


def test_tf32_on_a_cpu_is_float32_to_the_last_bit(world: Path, tmp_path: Path) -> None:
    runs = []
    for name in ("float32", "tf32"):
        config = make_config(world, precision=name, backbone__trainable=True, method__name="gar")
        model, mixture = tiny_runs.load(config)
        fit(model, mixture, config)
        runs.append(weights(model))
        model.save_pretrained(tmp_path / name)
        assert MultiTaskModel.from_pretrained(tmp_path / name).precision == name
    assert same_bits(*runs)


@pytest.mark.parametrize("name", ["float32", "tf32", "bfloat16"])
def test_losses_gates_and_group_gradients_stay_float32(world: Path, name: str) -> None:
    config = make_config(
        world, precision=name, backbone__trainable=True, experts__site="full_ffn", method__name="gar"
    )
    model, mixture = tiny_runs.load(config)
    source, _ = make_sources(model, mixture, config.cache)
    updater = Updater(model.train(), source, config, ["mood", "nli"])
    update = updater.gradients(updater.schedule.groups(0), 0)
    (site,) = update.sites
    assert update.losses.dtype == site.gradients().dtype == site.probabilities().dtype == torch.float32
    assert {p.grad.dtype for p in updater.parameters if p.grad is not None} == {torch.float32}


@GPU
@pytest.mark.parametrize(("setting", "name"), itertools.product(SETTINGS, precision.PRECISIONS))
def test_products_on_a_gpu_have_the_digits_that_were_asked_for(setting: str, name: str) -> None:
    """Whatever the program allows; TF32 keeps 10 bits of each factor, float32 23."""
    of_the_user(setting)
    torch.manual_seed(0)
    a = torch.randn(512, 512, device=CUDA, requires_grad=True)
    b = torch.randn(512, 512, device=CUDA)
    exact = a.detach().double() @ b.double()

    def digits(product: Tensor) -> str:
        error = float((product.detach().double() - exact).norm() / exact.norm())
        return "float32" if error < 1e-6 else "tf32" if error < 1e-3 else "bfloat16"

    with computing_in(CUDA, name):
        assert digits(a @ b) == name
        assert digits(matmul(a, b)) == "float32"
        with full_precision(CUDA):
            assert digits(a @ b) == "float32"
    with float32_products(CUDA, tf32=name == "tf32"):
        (grad,) = torch.autograd.grad(matmul(a, b), a, b.T)  # exact products have an exact derivative
    pulled = b.T.double() @ b.T.double()
    assert float((grad.double() - pulled).norm() / pulled.norm()) < 1e-6
    assert digits(a @ b) == ("tf32" if setting in ("high", "medium", "all", "cuda") else "float32")

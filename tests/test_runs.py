"""Run directories: their files, what is refused, and going on after an interruption."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from filelock import FileLock

from gar import config as configuration
from gar.config import Config, Kind, digest, flat, kind_of
from gar.data import Mixture, Task
from gar.data.load import load as load_data
from gar.data.task import Split
from gar.errors import UserError
from gar.methods import from_config
from gar.model.multitask import MultiTaskModel
from gar.runs.history import History, read_lines
from gar.runs.reading import read_run
from gar.runs.state import State
from gar.runs.stopping import StopSignals
from gar.training import Hooks, Interrupted, TrainingFailure, checkpoint, fit, train, train_from_config
from support import tiny_runs
from support.tiny_runs import make_config, same_bits, weights

FORK = multiprocessing.get_context("fork")


def saved(directory: Path) -> dict[str, torch.Tensor]:
    return weights(MultiTaskModel.from_pretrained(directory / "model"))


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir() if path.name != ".lock"}


def stop_at(update: int, number: int = signal.SIGTERM) -> Hooks:
    """Sends this process a signal in the middle of a training."""

    def send(done: int, total: int, loss: float) -> None:
        if done == update:
            os.kill(os.getpid(), number)

    return Hooks(update=send)


def same_result(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Everything but the time it took."""
    return {**a, "timing": None} == {**b, "timing": None}


# ---------------------------------------------------------------------- files


def test_the_files_of_a_run(world: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    config = make_config(world, method__name="gar", checkpoint__every=2)
    result = train_from_config(config, out)
    files = {"config.yaml", "environment.json", "history.jsonl", "diagnostics.json", "checksums.json"}
    files |= {"result.json"}
    assert names(out) == files | {"model"}
    assert json.loads((out / "result.json").read_text()) == result
    assert list(result) == [
        *("schema", "method", "mixture", "seed", "updates", "examples", "majority"),
        *("accuracy", "routing", "timing"),
    ]
    assert (result["schema"], result["method"], result["mixture"]) == (1, "gar", "tiny")
    assert (result["seed"], result["updates"]) == (0, 5)
    assert result["examples"] == {"mood": [21, 12], "nli": [11, 9]}
    assert set(result["majority"]) == {"mood", "nli"}
    assert all(0.3 < share < 1 for share in result["majority"].values())
    assert set(result["accuracy"]) == {"macro", "tasks", "extra"}
    assert set(result["routing"]) >= {
        *("load", "load_variance", "utilization", "gradient_mass_purity", "structure_purity", "nmi", "ari"),
        *("entropy", "intra_expert_coherence", "inter_expert_similarity"),
    }
    assert len(result["routing"]["load"]) == 3
    assert set(result["timing"]) == {"updates_per_second", "step_seconds_mean"}
    assert configuration.load(out / "config.yaml") == config
    environment = json.loads((out / "environment.json").read_text())
    assert {"gar", "python", "libraries", "device", "seed", "commit", "command"} <= set(environment)
    lines = read_lines(out / "history.jsonl")
    assert [line["update"] for line in lines] == [1, 2, 3, 4, 5]
    assert set(lines[0]) == {"update", "loss", "tasks", "gradient_norm", "learning_rate"}
    assert lines[0]["loss"] == pytest.approx(sum(lines[0]["tasks"].values()) / 2)
    kinds = {path.suffix for path in (out / "model").rglob("*") if path.is_file()}
    assert kinds <= {".json", ".safetensors", ".txt", ".md"}, "nothing that has to be unpickled"
    assert "validation accuracy" in (out / "model" / "README.md").read_text()


def test_subsets_of_one_mixture_are_told_apart(world: Path, tmp_path: Path) -> None:
    result = train_from_config(make_config(world, mixture__max_train_examples=15), tmp_path / "run")
    assert result["examples"] == {"mood": [15, 12], "nli": [11, 9]}


def test_the_result_comes_last_and_checkpoints_go_after_it(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    seen: list[set[str]] = []
    original = MultiTaskModel.save_pretrained

    def watched(self: MultiTaskModel, directory: Path) -> None:
        seen.append(names(out))
        original(self, directory)

    monkeypatch.setattr(MultiTaskModel, "save_pretrained", watched)
    train_from_config(make_config(world, checkpoint__every=2), out)
    assert "checkpoints" in seen[0]
    assert "result.json" not in seen[0]
    assert "checkpoints" not in names(out)


def test_a_crash_at_the_very_end_goes_on_from_the_last_update(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, config = tmp_path / "run", make_config(world, checkpoint__every=2)
    with monkeypatch.context() as patch:
        patch.setattr(MultiTaskModel, "save_pretrained", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train_from_config(config, out)
    failure = json.loads((out / "failure.json").read_text())
    assert failure == {
        "error": "ZeroDivisionError",
        "reason": "division by zero",
        "update": 5,
        "checkpoint": "checkpoints/00000005",
    }
    hooks = Hooks(update=lambda *n: pytest.fail("an update ran again"))
    result = train_from_config(config, out, resume=True, hooks=hooks)
    assert same_result(result, train_from_config(config, tmp_path / "whole"))
    assert "failure.json" not in names(out)


def test_a_tracker_gets_history_evaluations_and_result(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    class Recorder:
        def __init__(self, tracking: str, directory: Path | None, config: Any) -> None:
            calls.append((tracking, directory, config["seed"]))

        def log(self, update: int, values: Any) -> None:
            calls.append((update, sorted(set(values) - {"update"})))

        def close(self) -> None:
            calls.append("closed")

    monkeypatch.setattr("gar.training.run.Tracker", Recorder)
    config = make_config(world, tracking="tensorboard", optimizer__updates=3, evaluation__every=2)
    train_from_config(config, tmp_path / "run")
    update = ["gradient_norm", "learning_rate", "loss", "tasks"]
    assert calls == [
        ("tensorboard", tmp_path / "run", 0),
        *[(1, update), (2, update), (2, ["evaluation"]), (3, update), (3, ["evaluation"])],
        "closed",
    ]


def test_a_missing_tracker_leaves_no_half_made_run(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="tracking is wandb, which is not installed"):
        train_from_config(make_config(world, tracking="wandb"), tmp_path / "run")
    monkeypatch.undo()
    assert not (tmp_path / "run").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="feature cache"):
        train_from_config(make_config(world, cache__directory=str(tmp_path / "file")), tmp_path / "run")
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------------- what is refused


def test_directories_that_are_refused(world: Path, tmp_path: Path) -> None:
    config = make_config(world, optimizer__updates=2)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="exists and is no directory"):
        train_from_config(config, tmp_path / "file")
    with pytest.raises(UserError, match="Not a directory"):
        train_from_config(config, tmp_path / "file" / "below")
    out = tmp_path / "run"
    result = train_from_config(config, out)
    with pytest.raises(UserError, match="holds a finished run"):
        train_from_config(config, out)
    assert json.loads((out / "result.json").read_text()) == result
    (out / "result.json").unlink()
    with pytest.raises(UserError, match="holds an unfinished run; continue it with --resume"):
        train_from_config(config, out)


def test_an_unrelated_directory_keeps_its_files(world: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    train_from_config(make_config(world, optimizer__updates=1), tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("resume", [False, True])
def test_a_directory_in_use_is_refused(world: Path, tmp_path: Path, resume: bool) -> None:
    config = make_config(world)
    with pytest.raises(Interrupted):
        train_from_config(config, tmp_path / "run", hooks=stop_at(2))
    ready, over = FORK.Event(), FORK.Event()

    def hold() -> None:
        with FileLock(tmp_path / "run" / ".lock"):
            ready.set()
            over.wait(20)
        os._exit(0)

    child = FORK.Process(target=hold)
    child.start()
    assert ready.wait(20)
    try:
        with pytest.raises(UserError, match="another process is running in this directory"):
            train_from_config(config, tmp_path / "run", resume=resume)
        model, mixture = tiny_runs.load(config)
        with pytest.raises(UserError, match="another process is running in this directory"):
            train(model, mixture, config=config, out=tmp_path / "run", resume=resume)
    finally:
        over.set()
        child.join()
    train_from_config(config, tmp_path / "run", resume=True)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"optimizer__learning_rate": 0.5}, r"optimizer\.learning_rate: 0\.01, found 0\.5"),
        ({"method__name": "baseline"}, r"method\.name: 'gar', found 'baseline'"),
        ({"seed": 1}, "seed: 0, found 1"),
        ({"cache__dtype": "float16"}, r"cache\.dtype: 'float32', found 'float16'"),
        ({"mixture__batch_size": 4}, r"mixture\.batch_size: 8, found 4"),
    ],
)
def test_resuming_with_another_configuration_names_the_key(
    world: Path, tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    out = tmp_path / "run"
    with pytest.raises(Interrupted):
        train_from_config(make_config(world), out, hooks=stop_at(2))
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match=named):
        train_from_config(make_config(world, **changes), out, resume=True)
    assert before == {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}


def test_where_a_run_goes_on_may_change(world: Path, tmp_path: Path) -> None:
    assert kind_of("cache.directory") is Kind.PLACE
    out = tmp_path / "run"
    with pytest.raises(Interrupted):
        train_from_config(make_config(world), out, hooks=stop_at(2))
    elsewhere = make_config(
        world, cache__directory=str(tmp_path / "cache"), checkpoint__every=1, checkpoint__keep=1
    )
    result = train_from_config(elsewhere, out, resume=True)
    assert same_result(result, train_from_config(make_config(world), tmp_path / "whole"))


@pytest.mark.parametrize("content", ["- a list\n", "a: [1\n", "", "\0"])
def test_an_unreadable_configuration_is_one_clear_error(world: Path, tmp_path: Path, content: str) -> None:
    (tmp_path / "config.yaml").write_text(content)
    with pytest.raises(UserError, match=r"config\.yaml: cannot be read"):
        train_from_config(make_config(world), tmp_path, resume=True)


# ---------------------------------------------------------------------- going on


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("changes", [{}, {"backbone__trainable": True}, {"experts__site": "lora_head"}])
def test_an_interrupted_run_goes_on_to_the_same_bits(
    world: Path, tmp_path: Path, number: int, changes: dict[str, Any]
) -> None:
    """Mid-epoch for every task: 21 and 11 examples in batches of 8."""
    config = make_config(
        world, method__name="gar", optimizer__updates=9, optimizer__warmup=0.5, evaluation__every=3, **changes
    )
    whole = train_from_config(config, tmp_path / "whole")
    out = tmp_path / "run"
    for update in (2, 7):
        with pytest.raises(Interrupted, match=f"stopped after update {update} of 9"):
            train_from_config(config, out, resume=True, hooks=stop_at(update, number))
        assert [path.name for path in (out / "checkpoints").iterdir()][-1:] != []
        assert (out / "checkpoints" / f"{update:08d}").is_dir()
        assert not (out / "failure.json").exists()
    result = train_from_config(config, out, resume=True)
    assert same_result(whole, result)
    assert same_bits(saved(tmp_path / "whole"), saved(out))
    assert (tmp_path / "whole" / "history.jsonl").read_bytes() == (out / "history.jsonl").read_bytes()


def test_a_signal_in_the_last_update_keeps_its_checkpoint(world: Path, tmp_path: Path) -> None:
    config = make_config(world)
    with pytest.raises(Interrupted, match="stopped after update 5 of 5"):
        train_from_config(config, tmp_path / "run", hooks=stop_at(5))
    hooks = Hooks(update=lambda *n: pytest.fail("an update ran again"))
    result = train_from_config(config, tmp_path / "run", resume=True, hooks=hooks)
    assert same_result(result, train_from_config(config, tmp_path / "whole"))


def test_the_second_signal_acts_at_once() -> None:
    with StopSignals() as seen:
        signal.raise_signal(signal.SIGINT)
        assert seen()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_finished_run_is_resumed_to_its_result(world: Path, tmp_path: Path) -> None:
    config, out = make_config(world, method__name="gar"), tmp_path / "run"
    result = train_from_config(config, out)
    (out / "checkpoints" / "00000004").mkdir(parents=True)  # as a kill at the very end leaves it
    stamp = (out / "result.json").stat().st_mtime_ns
    assert train_from_config(config, out, resume=True) == result
    assert (out / "result.json").stat().st_mtime_ns == stamp
    assert not (out / "checkpoints").exists()
    with pytest.raises(UserError, match="seed: 0, found 1"):
        train_from_config(make_config(world, method__name="gar", seed=1), out, resume=True)
    model, mixture = tiny_runs.load(config)
    assert train(model, mixture, config=config, out=out, resume=True) == result
    assert same_bits(weights(model), saved(out))


def test_resuming_where_nothing_was_trained_starts_over_and_says_so(world: Path, tmp_path: Path) -> None:
    config, out = make_config(world), tmp_path / "run"
    whole = train_from_config(config, tmp_path / "whole")
    out.mkdir()
    shutil.copy(tmp_path / "whole" / "config.yaml", out)
    said: list[str] = []
    result = train_from_config(config, out, resume=True, hooks=Hooks(message=said.append))
    assert same_result(result, whole)
    (line,) = said
    assert line.endswith("no intact checkpoint to continue from; training starts from the beginning")
    said.clear()
    train_from_config(config, tmp_path / "new", resume=True, hooks=Hooks(message=said.append))
    assert said == [], "a new run has nothing to complain about"


def test_only_the_last_checkpoints_are_kept(world: Path, tmp_path: Path) -> None:
    config = make_config(world, checkpoint__every=1, checkpoint__keep=3, optimizer__updates=6)
    with pytest.raises(Interrupted):
        train_from_config(config, tmp_path / "run", hooks=stop_at(5))
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == ["00000003", "00000004", "00000005"]
    assert {path.name for path in (tmp_path / "run" / "checkpoints" / kept[-1]).iterdir()} == {
        *("model.safetensors", "optimizer.safetensors", "state.json")
    }


def test_an_interruption_without_a_directory_is_an_interruption(world: Path) -> None:
    model, mixture = tiny_runs.load(make_config(world))
    with pytest.raises(Interrupted):
        fit(model, mixture, make_config(world), hooks=stop_at(2))


def test_a_history_with_a_hole_is_told(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    path.write_text('{"update": 1}\n{"update": 2}\nbroken\n{"update": 4}\n{"update": 5, "lo')
    said: list[str] = []
    history = History(path)
    history.rewind(4, said.append)
    assert said == [f"{path} is damaged: 2 of the first 4 updates are missing in it"]
    assert [line["update"] for line in read_lines(path)] == [1, 2]
    history.rewind(0)
    assert path.read_text() == ""


# ---------------------------------------------------------------------- runs from Python


def python_run(world: Path, out: Path, mixture: Mixture | None = None) -> Config:
    config = make_config(world)
    model, loaded = tiny_runs.load(config)
    cache = {"directory": config.cache.directory}
    train(model, mixture or loaded, from_config("gar"), out=out, updates=2, cache=cache, device="cpu")
    return configuration.load(out / "config.yaml")


def test_a_run_from_python_claims_no_files(world: Path, tmp_path: Path) -> None:
    config = python_run(world, tmp_path / "run")
    text = (tmp_path / "run" / "config.yaml").read_text()
    assert text.startswith(
        "# Made by gar.train from a mixture in memory: where its data came from is not known"
    )
    first, second = yaml.safe_load(text)["mixture"]["tasks"]
    assert (first["name"], first["text"], first["labels"]) == ("mood", "review", ["bad", "good"])
    assert second["text"] == ["premise", "hypothesis"]
    assert first["train"] is first["validation"] is first["hub"] is None
    with pytest.raises(UserError, match="task 'mood': no training data"):
        load_data(config.mixture.tasks)


def named_task(name: str, labels: tuple[str, ...]) -> Task:
    split = Split(["w1 w2", "w3", "w12 w14", "w11"] * 2, torch.tensor([0, 0, 1, 1] * 2).numpy())
    return Task(name, labels, split, split, ("sentence",))


def test_registered_names_are_claimed_only_where_they_fit(world: Path, tmp_path: Path) -> None:
    config = make_config(world)
    sst2 = load_data_labels("sst2")
    for n, (labels, expected) in enumerate(((sst2, "sst2"), (("x", "y"), None))):
        task = named_task("sst2", labels)
        model = MultiTaskModel.from_pretrained(config.backbone, [task], config.experts)
        mixture = Mixture("five", (task,), 4, 2)
        cache = {"directory": config.cache.directory}
        train(model, mixture, out=tmp_path / str(n), updates=1, cache=cache, device="cpu")
        tree = yaml.safe_load((tmp_path / str(n) / "config.yaml").read_text())["mixture"]
        assert tree["name"] is None, "the registered mixture five has other tasks"
        (entry,) = tree["tasks"]
        assert entry == expected if expected else entry["labels"] == ["x", "y"]


def load_data_labels(name: str) -> tuple[str, ...]:
    from gar.data.registry import find_task

    return find_task(name).labels


def test_a_failure_from_python_is_recorded(world: Path, tmp_path: Path) -> None:
    config = make_config(world, optimizer__learning_rate=1e30, checkpoint__every=1)
    with pytest.raises(TrainingFailure):
        train_from_config(config, tmp_path / "run")
    failure = json.loads((tmp_path / "run" / "failure.json").read_text())
    assert failure["error"] == "TrainingFailure"
    assert failure["reason"].startswith("update 2: the loss of task mood, group 0 is")
    assert (failure["update"], failure["checkpoint"]) == (2, "checkpoints/00000001")
    assert [line["update"] for line in read_lines(tmp_path / "run" / "history.jsonl")] == [1]


# ---------------------------------------------------------------------- finished files, sessions, data


@pytest.mark.parametrize("name", ["result.json", "history.jsonl", "environment.json", "diagnostics.json"])
def test_a_flipped_digit_in_a_finished_file_is_told(world: Path, tmp_path: Path, name: str) -> None:
    config, out = make_config(world), tmp_path / "run"
    train_from_config(config, out)
    assert read_run(out).state is State.FINISHED
    content = (out / name).read_text(encoding="utf-8")
    at = next(i for i, sign in enumerate(content) if sign in "12345678" and content[i - 1] == ".")
    (out / name).write_text(content[:at] + str(int(content[at]) + 1) + content[at + 1 :], encoding="utf-8")
    run = read_run(out)
    assert run.state is State.UNREADABLE
    assert str(run.reason).startswith(f"{name}: its checksum differs")
    with pytest.raises(UserError, match=rf"{name}: its checksum differs"):
        train_from_config(config, out, resume=True)


def test_a_finished_run_without_checksums_or_model_is_read(world: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    train_from_config(make_config(world), out)
    shutil.rmtree(out / "model")
    assert read_run(out).state is State.FINISHED
    (out / "checksums.json").unlink()  # as before version 0.2
    assert read_run(out).state is State.FINISHED
    (out / "checksums.json").write_text("{}")
    assert str(read_run(out).reason).startswith("checksums.json: cannot be read")


def test_every_session_of_a_run_leaves_a_trace(world: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    said: list[str] = []
    with pytest.raises(Interrupted):
        train_from_config(make_config(world, threads=1), out, hooks=stop_at(2))
    before = json.loads((out / "environment.json").read_text())
    assert (before["threads"], "resumed" in before) == (1, False)
    other = make_config(world, threads=2, cache__enabled=False)
    train_from_config(other, out, resume=True, hooks=Hooks(message=said.append))
    environment = json.loads((out / "environment.json").read_text())
    assert environment["threads"] == 1
    assert [session["threads"] for session in environment["resumed"]] == [2]
    told = "\n".join(said)
    assert "threads was 1 and is 2" in told
    assert "cache.enabled was True and is False" in told


def test_threads_of_a_run_end_with_it(world: Path, tmp_path: Path) -> None:
    before = torch.get_num_threads()
    train_from_config(make_config(world, threads=before + 1), tmp_path / "run")
    assert json.loads((tmp_path / "run" / "environment.json").read_text())["threads"] == before + 1
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(("pause", "updates"), [(0, [2, 4, 5]), (1e9, [5])])
def test_checkpoints_that_follow_too_soon_are_left_out(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pause: float, updates: list[int]
) -> None:
    written: list[int] = []
    save = checkpoint.save

    def saving(root: Path, update: int, *state: Any) -> Path:
        written.append(update)
        return save(root, update, *state)

    monkeypatch.setattr(checkpoint, "save", saving)
    train_from_config(make_config(world, checkpoint={"every": 2, "pause": pause}), tmp_path / "run")
    assert written == updates


def test_every_key_says_what_it_is() -> None:
    keys = {key: kind_of(key) for key in flat(Config().to_dict())}
    assert {key for key, kind in keys.items() if kind is Kind.BOOKKEEPING} == {
        *("checkpoint.every", "checkpoint.pause", "checkpoint.keep", "evaluation.every", "tracking", "preset")
    }
    assert {key for key, kind in keys.items() if kind is Kind.PLACE} == {
        *("device", "threads", "data_dir", "plugins", "cache.enabled", "cache.directory", "observation"),
        *("max_tokens_per_pass", "evaluation.batch_tokens", "backbone.gradient_checkpointing", "capture"),
    }


@pytest.mark.parametrize("key", ["cache.dtype=float16", "experts.rank=3", "method.coefficient=0.5"])
def test_another_result_has_another_digest(world: Path, key: str) -> None:
    config = make_config(world)
    assert digest(config.override([key]).to_dict()) != digest(config.to_dict())
    places = ["cache.directory=/elsewhere", "device=cuda", "threads=3", "checkpoint.every=7", "seed=4"]
    assert digest(config.override(places).to_dict()) == digest(config.to_dict())

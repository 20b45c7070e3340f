"""Runs that survive: kill -9 at any moment, damaged checkpoints, full disks, divergence, exit codes."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from gar.cli import main
from gar.config import Config
from gar.errors import UserError
from gar.model.multitask import MultiTaskModel
from gar.runs.history import read_lines
from gar.training import Hooks, Interrupted, checkpoint, train_from_config
from gar.training.updater import make_optimizer
from support import tiny_runs
from support.tiny_runs import make_config, same_bits, small_file_system, weights
from support.waiting import until

FORK = multiprocessing.get_context("fork")
FILES = (checkpoint.MODEL, checkpoint.OPTIMIZER, checkpoint.STATE)


def saved(directory: Path) -> dict[str, torch.Tensor]:
    return weights(MultiTaskModel.from_pretrained(directory / "model"))


def assert_same_run(a: Path, b: Path) -> None:
    assert (a / "history.jsonl").read_bytes() == (b / "history.jsonl").read_bytes()
    results = [{**json.loads((out / "result.json").read_text()), "timing": None} for out in (a, b)]
    assert results[0] == results[1]
    assert same_bits(saved(a), saved(b))


def skip_where_forks_cannot_train() -> None:
    """torch refuses a backward in a fork of a process with a GPU's threads; tests/test_kills.py spawns."""
    if torch.cuda.is_available():
        pytest.skip("forks cannot train where a GPU is")


def in_child(work: Callable[[], Any]) -> Any:
    """Start ``work`` in a copy of this process; exit code 0 if it returned."""
    skip_where_forks_cannot_train()

    def run() -> None:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    child = FORK.Process(target=run)
    child.start()
    return child


# ---------------------------------------------------------------------- kill -9


class Calls:
    """Counts the calls of functions of this process, and kills it at one of them."""

    def __init__(self, last: int | None = None) -> None:
        self.count, self.last = 0, last

    def __call__(self, frame: Any, event: str, arg: Any) -> None:
        self.count += 1
        if self.count == self.last:
            os.kill(os.getpid(), signal.SIGKILL)

    def __enter__(self) -> Calls:
        sys.setprofile(self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)


def test_twenty_kills_do_not_change_a_bit(world: Path, tmp_path: Path) -> None:
    """Wherever they strike: loading, training, writing a checkpoint, evaluating, saving the model."""
    config = make_config(
        world, method__name="gar", optimizer__updates=66, checkpoint__every=3, evaluation__every=20
    )
    with Calls() as whole:
        train_from_config(config, tmp_path / "whole")
    out, numbers, kills = tmp_path / "run", random.Random(0), 0
    places: set[int] = set()

    def resumed(most: int, last: int) -> None:
        """Goes on until the call ``last``, or for at most so many updates."""
        left = iter(range(most))

        def update(*_: Any) -> None:
            if next(left, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)

        with Calls(last):
            train_from_config(config, out, resume=True, hooks=Hooks(update=update))

    while not (out / "result.json").is_file():
        # Twenty kills within the training (66 updates, three at most a time), a few up to the end of the run,
        # then it may finish.
        most = 3 if kills < 20 else 100
        last = int(whole.count * numbers.uniform(0.02, 0.9)) if kills < 25 else 0
        child = in_child(partial(resumed, most, last))
        child.join()
        assert child.exitcode in (0, -signal.SIGKILL)
        kills += child.exitcode != 0
        places.add(len(read_lines(out / "history.jsonl")))
    assert kills >= 20
    assert len(places) > 4
    assert_same_run(tmp_path / "whole", out)


def test_a_kill_between_any_two_file_operations_of_a_checkpoint(world: Path, tmp_path: Path) -> None:
    """Stops dead before the n-th file operation of the second checkpoint, for every n there is."""
    config = make_config(world, optimizer__updates=5, checkpoint__every=2, checkpoint__keep=1)
    train_from_config(config, tmp_path / "whole")

    def dying(n: int, out: Path) -> None:
        left = n

        def count(event: str, args: Any) -> None:
            nonlocal left
            if event not in {"open", "os.rename", "os.mkdir", "shutil.rmtree", "os.rmdir", "os.remove"}:
                return
            if "checkpoints" in str(args[0]) and "00000004" in str(args[0]):
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        train_from_config(config, out, resume=True)

    killed = 0
    for n in range(0, 40, 2):
        out = tmp_path / str(n)
        child = in_child(partial(dying, n, out))
        child.join()
        if child.exitcode == 0:
            break
        assert child.exitcode == -signal.SIGKILL
        killed += 1
        train_from_config(config, out, resume=True)
        assert_same_run(tmp_path / "whole", out)
    assert 3 <= killed < 20


# ---------------------------------------------------------------------- damaged checkpoints


@pytest.fixture(scope="module")
def stopped(world: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, Path, Path]:
    """A configuration, its whole run, and the same run stopped with the checkpoints of updates 2 and 4."""
    root = tmp_path_factory.mktemp("stopped")
    config = make_config(world, method__name="gar", optimizer__updates=6, checkpoint__every=2)
    train_from_config(config, root / "whole")

    def stop(done: int, total: int, loss: float) -> None:
        if done == 4:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(Interrupted):
        train_from_config(config, root / "run", hooks=Hooks(update=stop))
    return config, root / "whole", root / "run"


def damage(path: Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    if how.startswith("flip"):
        at = {"first": 0, "middle": len(content) // 2, "last": len(content) - 1}[how.split()[1]]
        content[at] ^= 0x11
        path.write_bytes(content)
    elif how == "truncate":
        path.write_bytes(content[: len(content) // 2])
    elif how == "empty":
        path.write_bytes(b"")
    else:
        path.unlink()


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("how", ["flip first", "flip middle", "flip last", "truncate", "empty", "remove"])
def test_a_damaged_checkpoint_is_passed_over_with_a_line(
    stopped: tuple[Config, Path, Path], tmp_path: Path, name: str, how: str
) -> None:
    config, whole, run = stopped
    out = tmp_path / "run"
    shutil.copytree(run, out)
    damage(out / "checkpoints" / "00000004" / name, how)
    said: list[str] = []
    train_from_config(config, out, resume=True, hooks=Hooks(message=said.append))
    (line,) = said
    assert line.startswith(f"checkpoint {out / 'checkpoints' / '00000004'} is damaged (")
    assert line.endswith("); trying the one before it")
    assert name in line
    assert_same_run(whole, out)


def test_any_flipped_byte_of_the_state_is_seen_or_harmless(
    stopped: tuple[Config, Path, Path], tmp_path: Path
) -> None:
    config, _, run = stopped
    shutil.copytree(run / "checkpoints" / "00000004", tmp_path / "00000004")
    model, _ = tiny_runs.load(config)
    optimizer = make_optimizer(model, config.optimizer)
    intact = checkpoint.load(tmp_path, model, optimizer, lambda line: None)
    assert intact is not None
    path = tmp_path / "00000004" / checkpoint.STATE
    content = path.read_bytes()
    for at in range(len(content)):
        changed = bytearray(content)
        changed[at] ^= 0x01
        path.write_bytes(changed)
        assert checkpoint.load(tmp_path, model, optimizer, lambda line: None) in (None, intact)


def test_when_all_are_damaged_the_run_starts_over_and_says_so(
    stopped: tuple[Config, Path, Path], tmp_path: Path
) -> None:
    config, whole, run = stopped
    out = tmp_path / "run"
    shutil.copytree(run, out)
    for path in (out / "checkpoints").iterdir():
        damage(path / checkpoint.MODEL, "truncate")
    said: list[str] = []
    train_from_config(config, out, resume=True, hooks=Hooks(message=said.append))
    assert [line.split("is damaged")[0][-10:-1] for line in said[:2]] == ["/00000004", "/00000002"]
    assert said[2].endswith("training starts from the beginning")
    assert_same_run(whole, out)


def test_a_damaged_checkpoint_does_not_count_as_kept(
    stopped: tuple[Config, Path, Path], tmp_path: Path
) -> None:
    """After the damaged one of update 4 was passed over, update 3's is the newest and 2's its reserve."""
    config, whole, run = stopped
    out = tmp_path / "run"
    shutil.copytree(run, out)
    damage(out / "checkpoints" / "00000004" / checkpoint.OPTIMIZER, "empty")

    def stop(done: int, total: int, loss: float) -> None:
        if done == 3:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Interrupted):
        train_from_config(config, out, resume=True, hooks=Hooks(update=stop))
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["00000002", "00000003"]
    train_from_config(config, out, resume=True)
    assert_same_run(whole, out)


def test_a_checkpoint_holds_nothing_to_unpickle(stopped: tuple[Config, Path, Path]) -> None:
    _, _, run = stopped
    found = {path.name for path in (run / "checkpoints").rglob("*") if path.is_file()}
    assert found == set(FILES)


# ---------------------------------------------------------------------- full disks


def expect_full(config: Config, out: Path, hooks: Hooks, reason: str) -> None:
    with pytest.raises(
        UserError, match=rf"the checkpoint could not be written \(.*{reason}.*earlier ones are kept"
    ):
        train_from_config(config, out, hooks=hooks)


def test_a_limit_on_file_sizes_stops_with_a_clear_error_and_keeps_the_earlier_checkpoint(
    world: Path, tmp_path: Path
) -> None:
    config = make_config(world, optimizer__updates=6, checkpoint__every=2, method__name="gar")
    out = tmp_path / "run"

    def limit(done: int, total: int, loss: float) -> None:
        if done == 3:
            resource.setrlimit(resource.RLIMIT_FSIZE, (6000, resource.RLIM_INFINITY))

    child = in_child(lambda: expect_full(config, out, Hooks(update=limit), "File too large"))
    child.join()
    assert child.exitcode == 0
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["00000002"]
    failure = json.loads((out / "failure.json").read_text())
    assert (failure["error"], failure["update"]) == ("UserError", 4)
    assert failure["checkpoint"] == "checkpoints/00000002"
    train_from_config(config, out, resume=True)
    train_from_config(config, tmp_path / "whole")
    assert_same_run(tmp_path / "whole", out)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with small_file_system(tmp_path / "disk", "1m") as where:
        yield where


def fill_disk(path: Path, spare: int) -> None:
    """Take all of a file system but ``spare`` bytes."""
    free = os.statvfs(path.parent).f_bavail * os.statvfs(path.parent).f_frsize
    with path.open("wb") as file:
        file.write(b"0" * max(0, free - spare))


@pytest.mark.parametrize("spare", [0, 4096, 24576])
def test_a_full_disk_stops_with_a_clear_error_and_loses_nothing(
    world: Path, tmp_path: Path, small_disk: Path, spare: int
) -> None:
    config = make_config(world, optimizer__updates=6, checkpoint__every=2, method__name="gar")
    out = small_disk / "run"

    def fill(done: int, total: int, loss: float) -> None:
        if done == 3:
            fill_disk(small_disk / "filler", spare)

    with pytest.raises(UserError, match=r"No space left on device") as error:
        train_from_config(config, out, hooks=Hooks(update=fill))
    assert "kept" in str(error.value)
    assert not list((out / "checkpoints").glob(".*"))
    (small_disk / "filler").unlink()
    said: list[str] = []
    train_from_config(config, out, resume=True, hooks=Hooks(message=said.append))
    assert said == [], "the checkpoint of update 2 was whole"
    train_from_config(config, tmp_path / "whole")
    assert_same_run(tmp_path / "whole", out)


def test_a_disk_that_fills_up_at_the_very_end_keeps_the_last_checkpoint(
    world: Path, tmp_path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(world, optimizer__updates=3, checkpoint__every=2)
    out = small_disk / "run"
    original = MultiTaskModel.save_pretrained

    def save(self: MultiTaskModel, directory: Path) -> None:
        fill_disk(small_disk / "filler", 3000)
        original(self, directory)

    with monkeypatch.context() as patch:
        patch.setattr(MultiTaskModel, "save_pretrained", save)
        with pytest.raises(UserError, match=r"the model could not be written \(.*checkpoints are kept"):
            train_from_config(config, out)
    assert not (out / "result.json").exists()
    (small_disk / "filler").unlink()
    hooks = Hooks(update=lambda *n: pytest.fail("an update ran again"))
    train_from_config(config, out, resume=True, hooks=hooks)


def test_a_history_that_cannot_be_written_is_one_clear_error(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(self: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    monkeypatch.setattr("gar.runs.history.History.flush", no_space)
    with pytest.raises(UserError, match=r"history\.jsonl: No space left on device; complete files are kept"):
        train_from_config(make_config(world), tmp_path / "run")


# ---------------------------------------------------------------------- the process


class Gar:
    """``gar`` as a process: a copy of this one, which has imported everything already."""

    def __init__(self, *arguments: str) -> None:
        skip_where_forks_cannot_train()
        self.streams = [tempfile.mkstemp() for _ in range(2)]

        def run() -> None:
            for descriptor, (stream, _) in enumerate(self.streams, start=1):
                os.dup2(stream, descriptor)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
            main(list(arguments))

        self.process = FORK.Process(target=run)
        self.process.start()

    def wait(self) -> tuple[int | None, str, str]:
        """Exit code, output and errors."""
        self.process.join(120)
        texts = []
        for stream, name in self.streams:
            os.close(stream)
            texts.append(Path(name).read_text(encoding="utf-8"))
            os.unlink(name)
        return self.process.exitcode, texts[0], texts[1]

    def send(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)


@pytest.fixture(scope="module")
def file(world: Path) -> Path:
    path = world / "run.yaml"
    path.write_text(yaml.safe_dump(tiny_runs.tree(world, checkpoint__every=1)), encoding="utf-8")
    return path


def wait_for(path: Path, run: Gar) -> None:
    until(lambda: path.exists() or not run.process.is_alive())
    assert path.exists(), run.wait()


def test_the_console_command(file: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from gar.cli import main; main()", "train", str(file)]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "run")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "macro accuracy" in done.stdout
    assert (tmp_path / "run" / "result.json").is_file()


def test_a_diverged_run_exits_with_1_in_one_line(file: Path, tmp_path: Path) -> None:
    run = Gar("train", str(file), "optimizer.learning_rate=1e30", "--out", str(tmp_path / "run"))
    code, _, errors = run.wait()
    assert code == 1
    assert errors.startswith("error: update 2: the loss of task mood, group 0 is")
    assert errors.count("\n") == 1
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["00000001"]


def test_a_second_process_is_refused_and_an_interrupted_one_exits_with_130(
    file: Path, tmp_path: Path
) -> None:
    arguments = ("train", str(file), "optimizer.updates=100000", "--out", str(tmp_path / "run"))
    long = Gar(*arguments)
    wait_for(tmp_path / "run" / "checkpoints" / "00000001", long)
    for more in ((), ("--resume",)):
        code, _, errors = Gar(*arguments, *more).wait()
        assert code == 2
        assert errors == f"error: {tmp_path / 'run'}: another process is running in this directory\n"
    long.send(signal.SIGINT)
    code, _, errors = long.wait()
    assert code == 130
    last = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())[-1]
    assert errors == f"stopped after update {int(last)} of 100000\n"
    assert not (tmp_path / "run" / "failure.json").exists()


def test_sigterm_is_an_interruption_too(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    run = Gar("train", str(file), "optimizer.updates=100000", "checkpoint.every=0", "--out", str(out))
    wait_for(out / "history.jsonl", run)
    until(lambda: (out / "history.jsonl").read_bytes())
    run.send(signal.SIGTERM)
    code, _, errors = run.wait()
    assert code == 130
    assert errors.startswith("stopped after update ")
    assert len(list((out / "checkpoints").iterdir())) == 1


def test_a_second_signal_does_not_wait(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The update hangs; the first signal waits for its end, the second does not."""

    def hang(*args: Any) -> None:
        handler = signal.getsignal(signal.SIGINT)

        def noted(*what: Any) -> None:
            assert callable(handler)
            handler(*what)
            (tmp_path / "asked").touch()

        signal.signal(signal.SIGINT, noted)
        (tmp_path / "hangs").touch()
        time.sleep(600)

    monkeypatch.setattr("gar.training.updater.Updater.run", hang)
    run = Gar("train", str(file), "--out", str(tmp_path / "run"))
    wait_for(tmp_path / "hangs", run)
    run.send(signal.SIGINT)
    wait_for(tmp_path / "asked", run)
    assert run.process.is_alive()
    run.send(signal.SIGINT)
    code, _, errors = run.wait()
    assert (code, errors) == (130, "interrupted\n")

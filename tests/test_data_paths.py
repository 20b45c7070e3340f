"""Paths that lead nowhere, in a circle, or to no file: one line, whoever reads them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from gar.cli.app import run
from gar.config import MixtureConfig, TaskConfig
from gar.data import _bigbench, identity, load_task, read_texts
from gar.errors import UserError, path_kind, real_path, user_path


def own(path: str, validation: str = "dev.csv") -> TaskConfig:
    return TaskConfig(name="mood", train=path, validation=validation)


#: Every way in which the data room takes a path from the user.
READERS: dict[str, Callable[[str], object]] = {
    "train": lambda path: load_task(own(path)),
    "validation": lambda path: load_task(own("dev.csv", path)),
    "identity": lambda path: identity(MixtureConfig(tasks=(own(path),))),
    "data_dir": lambda path: load_task("rte", data_dir=path),
    "predict": lambda path: read_texts(["text"], path),
}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dev.csv").write_text("text,label\nx,a\ny,b\n")
    return tmp_path


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(UserError) as caught:
        call()
    assert str(caught.value).isprintable()
    return str(caught.value)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("loop.csv", "symbolic links form a loop"),
        ("loop.csv/x.csv", "symbolic links form a loop"),
        ("a" * 300 + ".csv", "file name too long"),
        ("a\0.csv", "a NUL character"),
        ("\ud800.csv", "a lone surrogate"),
        ("~no-such-user/x.csv", "no user of that name"),
        ("fifo.csv", "is a named pipe"),
        ("null.csv", "is a device"),
    ],
)
def test_paths_that_cannot_be_read(place: Path, reader: str, path: str, reason: str) -> None:
    (place / "loop.csv").symlink_to("loop.csv")
    (place / "null.csv").symlink_to(os.devnull)
    os.mkfifo(place / "fifo.csv")
    message = refusal(lambda: READERS[reader](path))
    assert reason in message
    assert message.startswith(path[:2].replace("\0", "\\x00").replace("\ud800", "\\ud800"))


@pytest.mark.parametrize("reader", READERS)
def test_a_forbidden_directory(monkeypatch: pytest.MonkeyPatch, reader: str) -> None:
    whole = Path.stat

    def stat(self: Path, **options: bool) -> os.stat_result:
        if self.name == "closed.csv":
            raise PermissionError(13, "Permission denied", str(self))
        return whole(self, **options)

    monkeypatch.setattr(Path, "stat", stat)  # root may enter every directory
    assert "closed.csv: permission denied" in refusal(lambda: READERS[reader]("closed.csv"))


def test_a_directory_that_cannot_be_listed(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    def iterdir(self: Path) -> object:
        raise PermissionError(13, "Permission denied", str(self))

    (place / "data").mkdir()
    monkeypatch.setattr(Path, "iterdir", iterdir)
    assert "trian.csv: no such file" in refusal(lambda: load_task(own("trian.csv")))
    assert "data: permission denied" in refusal(lambda: load_task("rte", data_dir="data"))


def test_a_file_that_fails_while_it_is_read(place: Path) -> None:
    memory = Path("/proc/self/mem")
    if not memory.exists():
        pytest.skip("needs a file whose first byte cannot be read")
    (place / "x.csv").symlink_to(memory)
    assert "x.csv: cannot be read" in refusal(lambda: load_task(own("x.csv")))


def test_files_in_the_place_of_directories(place: Path) -> None:
    assert "dev.csv: is a file; expected <task>" in refusal(lambda: load_task("rte", data_dir="dev.csv"))
    assert "no such file; the directory dev.csv" in refusal(lambda: load_task(own("dev.csv/x.csv")))


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("loop", "Too many levels"),
        ("a" * 300, "File name too long"),
        ("fifo", "Not a directory"),
        ("dev.csv", "Not a directory"),
        ("dev.csv/x", "Not a directory"),
        ("a\0", "a NUL character"),
        ("~no-such-user", "no user of that name"),
    ],
)
def test_cache_directories_that_are_none(
    place: Path, monkeypatch: pytest.MonkeyPatch, path: str, reason: str
) -> None:
    monkeypatch.setattr(_bigbench, "download", lambda directory: pytest.fail("nothing may be fetched"))
    (place / "loop").symlink_to("loop")
    os.mkfifo(place / "fifo")
    assert reason in refusal(lambda: load_task("fever", cache_dir=path))
    if "\0" not in path:
        monkeypatch.setenv("GAR_CACHE", path)
        assert reason in refusal(lambda: load_task("fever"))


def test_a_line_break_in_a_path_stays_in_one_line() -> None:
    assert r"a\nb.csv: no such file" in refusal(lambda: load_task(own("a\nb.csv")))


LONG = "a" * 300


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "loop.yaml"],
        ["train", LONG],
        ["train", "own.yaml", "--out", LONG],
        ["train", "own.yaml", "--out", "loop.yaml"],
        ["train", "own.yaml", "data_dir=~no-such-user/x"],
        ["train", "own.yaml", f"backbone.name={LONG}"],
        ["data", "check", "loop.yaml"],
        ["data", "check", LONG],
        ["data", "check", "tilde.yaml"],
        ["data", "check", "rte", "--data-dir", "loop.yaml"],
        ["sweep", "loop.yaml"],
        ["sweep", LONG],
        ["sweep", "five", "--data-dir", "loop.yaml"],
        ["search", LONG, "--out", "x"],
        ["report", "loop.yaml"],
        ["report", LONG],
        ["predict", "loop.yaml", "a text"],
        ["predict", LONG, "a text"],
        ["evaluate", LONG],
    ],
    ids=lambda arguments: " ".join(arguments)[:40],
)
def test_the_command_line_says_it_in_one_line(
    place: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    (place / "loop.yaml").symlink_to("loop.yaml")
    task = "{name: mood, train: %s, validation: dev.csv}"
    (place / "train.csv").write_text("text,label\nx,a\ny,b\n")
    (place / "own.yaml").write_text(f"mixture: {{tasks: [{task % 'train.csv'}]}}\n")
    (place / "tilde.yaml").write_text(f"mixture: {{tasks: [{task % '~no-such-user/x.csv'}]}}\n")
    assert run(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")


def test_ordinary_paths(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(place))
    (place / "link.csv").symlink_to("dev.csv")
    os.mkfifo(place / "fifo")
    assert user_path("~/dev.csv") == place / "dev.csv"
    assert real_path("link.csv") == place.resolve() / "dev.csv"
    kinds = [path_kind(path) for path in ("dev.csv", "link.csv", ".", "absent", "dev.csv/x", "fifo")]
    assert kinds == ["file", "file", "directory", "missing", "missing", "named pipe"]
    assert "one file" in refusal(lambda: load_task(own("link.csv")))

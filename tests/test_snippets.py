"""Every snippet of the documents is executed, in a small world; what is not stands here with the reason."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import shutil
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import torch
import yaml
from typer.main import get_command

from gar import config, metrics
from gar.cli.app import app
from gar.cli.app import run as gar_command
from gar.data import Mixture
from gar.methods import GAR, REGISTRY
from gar.model import MultiTaskModel
from gar.sweeps import build_suite
from support.saved_moe import save_moe, some_texts, word_tokenizer
from support.snippets import (
    PAGES,
    ROOT,
    Block,
    blocks,
    commands,
    make_documents_world,
    prose,
    shortened,
    small,
)
from support.sweeps import InProcess

#: Command lines that are only parsed: their first words, and why.
NOT_RUN = {
    "make": "makes an environment; .ci/run runs them",
    ".ci/run": "runs this test, among others",
    "pip install": "needs the network",
    "gar bench": "minutes; tests/test_benchmarks.py",
    "gar search": "a hundred and more runs; tests/test_search.py",
    "gar sweep own_suite.yaml --chosen": "wants what a search chose; tests/test_sweep_suite.py",
    "gar sweep bigbench": "a download; tests/test_sweep_suite.py plans it",
    "gar sweep evidence_": "hundreds of runs",
    "gar sweep paper_main": "hub models, and a Ray cluster; tests/test_sweep_ray.py",
    "gar sweep paper_head --out runs --jobs": "hub models",
    "gar sweep paper_head --out runs\n": "hub models",
    "gar sweep planted": "minutes; tests/test_planted.py",
    "gar report planted": "of those runs",
    "gar train paper/": "hub models and data",
    "gar train own.yaml optimizer.updates=500 --out runs/shorter": "own.yaml is a preset's copy there",
    "gar train own.yaml --ranks": "several processes; tests/test_ranks.py",
    "torchrun": "several processes; tests/test_ranks.py",
    "accelerate launch": "several GPUs",
    "gar data export bigbench_five": "a download; tests/test_data_bigbench.py",
    "gar inspect ./my-adapter": "needs peft; tests/test_inspect.py",
    "benchmarks/": "hours",
    **dict.fromkeys(("export", "mkdir", "nvidia-cuda-mps-control", "echo quit"), "NVIDIA's MPS service"),
    "python benchmarks/": "minutes to hours, or made for what is measured; tests/test_benchmarks.py",
}
#: Python blocks that are only compiled: a text in them, and why.
NOT_EXECUTED = {
    "# in src/gar/": "a part of a module; tests/test_contributing.py runs it there",
    "GARSFTTrainer(..., ": "`...` stands for arguments of the reader's; docs/trainer.md has the whole",
}
LANGUAGES = {"python", "bash", "yaml", "toml", "json", "text"}
#: Pages whose blocks stand alone each. Elsewhere a block goes on from the one before.
ALONE = ("docs/library.md",)
#: What has happened before a page begins.
BEFORE = {
    "docs/diagnostics.md": ["gar train own.yaml --out runs/x"],
    "docs/report.md": ["gar sweep own_suite.yaml --out runs"],
    "docs/paper.md": ["gar train own.yaml --out runs/x", "rm own.yaml"],
    "docs/rerun.md": [
        "gar sweep own_suite.yaml --out runs",
        "gar sweep own_suite.yaml --out runs/bigbench",
        "rm own.yaml",
    ],
    "docs/sweep.md": ["gar sweep own_suite.yaml --out runs", "gar sweep collect runs --store more.csv"],
}


def saved_world(tmp: Path) -> tuple[MultiTaskModel, Mixture]:
    """A model and the mixture of own.yaml."""
    built = config.load(tmp / "own.yaml")
    mixture = importlib.import_module("gar.data").load_mixture(built.mixture)
    return MultiTaskModel.from_pretrained(built.backbone, mixture.tasks, built.experts), mixture


def names_of_readme(tmp: Path) -> dict[str, Any]:
    head = torch.nn.Linear(768, 2)
    return {
        "probabilities": torch.softmax(torch.randn(6, 4), 1), "gradients": torch.randn(6, 5),
        "x": torch.randn(6, 768), "groups": torch.arange(6) // 2, "group_weight": torch.full((3,), 1 / 3),
        "model": head, "group_losses": lambda out: out.square().mean(1).view(3, 2).mean(1),
    }  # fmt: skip


def names_of_models(tmp: Path) -> dict[str, Any]:
    model, mixture = saved_world(tmp)
    return {"model": model, "mixture": mixture, "method": GAR(), "gar": importlib.import_module("gar")}


def names_of_inspect(tmp: Path) -> dict[str, Any]:
    transformers = importlib.import_module("transformers")
    news, code = some_texts(8).values()
    model = transformers.AutoModelForCausalLM.from_pretrained(save_moe(tmp / "moe"))
    return {"model": model, "news": news, "code": code, "tokenizer": word_tokenizer()}


#: What the blocks of a page take for granted.
GIVEN: dict[str, Callable[[Path], dict[str, Any]]] = {
    "README.md": names_of_readme,
    "docs/diagnostics.md": names_of_models,
    "docs/ranks.md": names_of_models,
    "docs/inspect.md": names_of_inspect,
    "docs/sweep.md": lambda tmp: {"out": tmp / "swept"},
}


@pytest.fixture(scope="session")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_documents_world(tmp_path_factory.mktemp("documents"))


@pytest.fixture
def world(documents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of it as the working directory; what a page registers is forgotten."""
    here = tmp_path / "world"
    shutil.copytree(documents, here, symlinks=True)
    monkeypatch.chdir(here)
    monkeypatch.setenv("GAR_CACHE", str(tmp_path / "cache"))
    for module in ("gar.comparison.compare", "gar.cli.sweep", "gar.sweeps"):
        monkeypatch.setattr(importlib.import_module(module), "LocalExecutor", InProcess)
    kept: list[tuple[Any, dict[Any, Any]]] = [(x, dict(x)) for x in (REGISTRY, metrics.METRICS, sys.modules)]
    yield here
    for registry, before in kept:
        for name in registry.keys() - before.keys():
            if registry is not sys.modules or name.startswith(("my_methods", "unit_gar", "gar_plugin")):
                del registry[name]


def reason(words: list[str]) -> str | None:
    """Why a command line is not run."""
    line = " ".join(words) + "\n"
    return next((why for start, why in NOT_RUN.items() if line.startswith(start)), None)


def all_commands() -> list[tuple[Block, list[str]]]:
    return [
        (block, words)
        for page in PAGES
        for block in blocks(page)
        if block.language == "bash"
        for words in commands(block)
    ]


def execute(words: list[str]) -> None:
    if words[0] == "cp":
        shutil.copy(*words[1:])
    elif words[0] == "rm":
        Path(words[1]).unlink()
    else:
        assert words[0] == "gar", words
        few = ["--seeds", "2"] if words[1] == "compare" and "--seeds" not in words else []
        assert gar_command([shortened(word) for word in words[1:]] + few) == 0, shlex.join(words)


@pytest.mark.parametrize("page", [p for p in PAGES if {b.language for b in blocks(p)} & {"python", "bash"}])
def test_the_snippets_of_a_page_run(page: str, world: Path) -> None:
    for line in BEFORE.get(page, ()):
        execute(shlex.split(line))
    names = GIVEN[page](world) if page in GIVEN else {}
    for block in blocks(page):
        if block.file:  # written where it says; a command, or tests/test_contributing.py, then takes it
            text = (
                block.text
                if block.language == "python"
                else yaml.safe_dump(small(yaml.safe_load(block.text)))
            )
            (world / block.file).write_text(text, encoding="utf-8")
        elif block.language == "bash":
            for words in commands(block):
                if reason(words) is None:
                    execute(words)
        elif block.language == "python":
            run(block, {**names} if page in ALONE else names)


def run(block: Block, names: dict[str, Any]) -> None:
    code = compile(shortened(block.text), str(block), "exec")
    if any(text in block.text for text in NOT_EXECUTED):
        return
    if "from trl" in block.text:
        pytest.importorskip("trl")
        pytest.importorskip("peft")
    exec(code, names)


# --------------------------------------------------------------------------------------------------
# What is not run is right as far as can be seen
# --------------------------------------------------------------------------------------------------


def parse(words: list[str]) -> None:
    """The command line of gar as its parser sees it: verbs, options, types of values."""
    command: Any = get_command(app)
    arguments, context = words, None
    while True:
        context = command.make_context(command.name or "gar", list(arguments), parent=context)
        if not isinstance(command, click.Group) and not hasattr(command, "resolve_command"):
            return
        rest = [*context._protected_args, *context.args]
        if not rest:
            return
        _, command, arguments = command.resolve_command(context, rest)


@pytest.mark.parametrize(
    ("block", "words"), all_commands(), ids=lambda value: str(value) if isinstance(value, Block) else None
)
def test_a_command_line_can_be_parsed(block: Block, words: list[str]) -> None:
    if words[0] in ("torchrun", "accelerate"):
        words = words[words.index("-m") + 1 :]
    program, *arguments = words
    if program == "gar":
        parse(arguments)
    elif program == "make":
        assert arguments[0] in re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    elif program == ".ci/run":
        assert all(f"{step}() {{" in (ROOT / program).read_text("utf-8") for step in arguments)
    elif program == "python":
        source = (ROOT / arguments[0]).read_text(encoding="utf-8")
        for option in (word for word in arguments if word.startswith("--")):
            assert option in source or option.removeprefix("--").replace("-", "_") in source, option
    elif not (program == "pip" or reason(words) == "NVIDIA's MPS service"):
        assert (ROOT / program).is_file(), program


def test_commands_in_sentences_exist() -> None:
    """``gar verb --option`` in backticks: verb and options are there; values may be placeholders."""
    for page in PAGES:
        text = prose(page)
        for line in re.findall(r"`gar ([a-z][^`]*)`", text):
            verb, *rest = re.sub(r"\s+", " ", line).split(" ")
            root: Any = get_command(app)
            _, command, _ = root.resolve_command(None, [verb])
            if rest and rest[0] in getattr(command, "commands", {}):
                command = command.commands[rest[0]]
            known = {option for parameter in _parameters(command) for option in parameter.opts}
            used = {word.split("=")[0].rstrip(",.") for word in rest if word.startswith("--")} - {"--help"}
            assert used <= known, (page, line)


def _parameters(command: Any) -> list[Any]:
    return [*command.params, *(p for each in getattr(command, "commands", {}).values() for p in each.params)]


def test_the_list_of_what_is_not_run_has_no_old_entry() -> None:
    lines = [" ".join(words) + "\n" for _, words in all_commands()]
    assert [start for start in NOT_RUN if not any(line.startswith(start) for line in lines)] == []
    python = [block.text for page in PAGES for block in blocks(page) if block.language == "python"]
    assert [text for text in NOT_EXECUTED if not any(text in block for block in python)] == []
    assert {*BEFORE, *GIVEN, *ALONE} <= set(PAGES)


def test_every_block_says_its_language_and_commands_stand_in_blocks() -> None:
    for page in PAGES:
        assert {block.language for block in blocks(page)} <= LANGUAGES
        text = prose(page)
        assert re.findall(r"^    (?:gar|make|python|pip|from|import) .*", text, re.MULTILINE) == []


def data_blocks(language: str) -> list[Block]:
    return [block for page in PAGES for block in blocks(page) if block.language == language]


@pytest.mark.parametrize("block", data_blocks("yaml"), ids=str)
def test_yaml_is_a_configuration_or_a_suite(block: Block, world: Path) -> None:
    tree = yaml.safe_load(block.text)
    if isinstance(tree, list):  # entries of mixture.tasks
        tree = {"mixture": {"tasks": tree}}
    if "settings" in tree:
        build_suite(tree, "own", world)
    elif "plugins" not in tree:  # those are used by a command, or by tests/test_contributing.py
        (world / "block.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
        config.load(world / "block.yaml")


def test_json_and_toml_parse() -> None:
    for block in data_blocks("json"):
        decoder, rest = json.JSONDecoder(), block.text.strip()
        while rest:
            _, end = decoder.raw_decode(rest)
            rest = rest[end:].strip()
    for block in data_blocks("toml"):
        tomllib.loads(block.text)

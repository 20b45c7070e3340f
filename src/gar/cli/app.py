"""The command tree, and the one place where errors become exit codes."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any, TextIO

import typer
from rich.console import Console
from typer.core import TyperGroup

from gar.errors import UserError, nearest
from gar.version import __version__

# typer brings its own click or uses the installed one, by version; its public errors lead to the classes.
UsageError: Any = typer.BadParameter.__bases__[0]
ClickException: Any = UsageError.__bases__[0]

INTERRUPTED = 130
#: Commands that a launcher may start as several ranks.
SPREAD = ("train",)
#: Failures that are told in one line.
TOLD = ("TrainingFailure", "OutOfMemory", "EvaluationFailure", "RankLost", "RankFailed")

#: verb: (module, attribute, one line of help). Modules are imported when their verb runs, so --help is quick.
VERBS = {
    "quickstart": (
        "gar.cli.quickstart",
        "quickstart",
        "Compare three methods on five real tasks, without a model hub.",
    ),
    "compare": (
        "gar.cli.compare",
        "compare",
        "Compare methods on your tasks with paired seeds, and choose a model.",
    ),
    "train": ("gar.cli.train", "train", "Train one multi-task model."),
    "evaluate": (
        "gar.cli.evaluate",
        "evaluate_run",
        "Measure a saved model on a mixture's validation splits.",
    ),
    "predict": ("gar.cli.predict", "predict", "Label texts with a trained model."),
    "diagnose": ("gar.cli.diagnose", "diagnose", "See what the experts of a saved model do."),
    "inspect": ("gar.cli.inspect", "inspect", "See what the experts of an MoE language model do."),
    "report": ("gar.cli.report", "report", "Tables and figures of any number of runs."),
    "data": ("gar.cli.data", "app", "Registered tasks and mixtures; check a mixture's data."),
    "presets": ("gar.cli.presets", "app", "The paper's configurations as named presets."),
    "sweep": ("gar.cli.sweep", "app", "Run a whole suite of configurations."),
    "search": ("gar.cli.search", "search", "Search hyperparameters by the paper's protocol."),
    "bench": ("gar.cli.bench", "app", "Measure update times on this machine."),
}


class LazyVerbs(TyperGroup):
    """Lists all verbs, imports only the one that is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return _command(cmd_name, _listed(VERBS[cmd_name][2])) if cmd_name in VERBS else None

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stop:  # typer would make an exit of it and drop what it says
            _print(str(stop) or "interrupted")
            return INTERRUPTED

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        if name not in VERBS:
            raise UserError(f"unknown command {name!r}{nearest(name, VERBS)}; see gar --help")
        if several_ranks() and name not in SPREAD:
            raise UserError(
                f"gar {name} runs in one process; expected no launcher, or what spreads over ranks: "
                + ", ".join(SPREAD)
            )
        module, attribute, _ = VERBS[name]
        return name, _command(name, getattr(importlib.import_module(module), attribute)), args[1:]


def _command(name: str, target: Any) -> Any:
    """The command behind a typer app or a plain function."""
    if not isinstance(target, typer.Typer):
        single = typer.Typer(add_completion=False)
        single.command(name=name)(target)
        target = single
    command = typer.main.get_command(target)
    command.name = name
    return command


def _listed(summary: str) -> Callable[[], None]:
    """Stands for a verb in the overview."""

    def verb() -> None: ...

    verb.__doc__ = summary
    return verb


app = typer.Typer(
    cls=LazyVerbs,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Gradient-aligned routing: one mixture-of-experts model for many text-classification tasks.",
)


def _version(asked: bool) -> None:
    if asked:
        print(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", help="Print the version and exit.", is_eager=True, callback=_version
    ),
) -> None: ...


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; exit codes: 0 done, 1 a failure, 2 the user's input, 130 interrupted."""
    signal.signal(signal.SIGTERM, _interrupt)
    warnings.showwarning = _warn
    code = run(sys.argv[1:] if arguments is None else arguments)
    if code and several_ranks():
        # A GPU that waits for the data of a lost rank would keep the process.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _warn(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """One line in place of Python's two, which show our own source."""
    _print(f"warning: {message}")


def _interrupt(number: int, frame: FrameType | None) -> None:
    """A request to end is an interruption like Ctrl-C, also outside of training."""
    raise KeyboardInterrupt


def run(arguments: list[str]) -> int:
    """The exit code of one command line."""
    try:
        code: Any = app(arguments, standalone_mode=False, prog_name="gar")
        return code if isinstance(code, int) else 0
    except UserError as error:
        return _say(str(error), 2)
    except UsageError as error:
        # Without any argument the help was shown instead of a message.
        return _say(_usage(error), 2) if error.format_message() else 2
    except ClickException as error:
        return _say(error.format_message(), 2)
    except (KeyboardInterrupt, typer.Abort):
        _print("interrupted")
        return INTERRUPTED
    except Exception as error:
        # By name: their types live behind the import of torch.
        if type(error).__name__ in TOLD:
            return _say(str(error), 1, speaks=getattr(error, "speaks", False))
        raise


def _say(message: str, code: int, speaks: bool = False) -> int:
    _print(f"error: {message}", speaks)
    return code


def _print(line: str, speaks: bool = False) -> None:
    if several_ranks() and os.environ.get("RANK", "0") != "0" and not speaks:  # the first rank speaks for all
        return
    Console(stderr=True, soft_wrap=True, highlight=False).print(line, markup=False)


def several_ranks() -> bool:
    """Whether a launcher has started this process as one of several."""
    return os.environ.get("WORLD_SIZE", "1") != "1" and "RANK" in os.environ


def _usage(error: Any) -> str:
    command = error.ctx.command_path if error.ctx else "gar"
    return f"{error.format_message().rstrip('.')}; see {command} --help"

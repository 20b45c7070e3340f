"""What a figure is about: a setting, a mixture or a scope, named or the only one there is."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from gar.errors import UserError, one_of
from gar.report._style import styles
from gar.report.results import Results, Scope
from gar.runs.reading import Run


class NothingToDraw(UserError):
    """The runs hold nothing for this figure; the message says why."""


def runs_with(results: Results, setting: str, mixture: str, key: str) -> dict[str, list[Run]]:
    """By variant the runs, by seed, whose results have this under ``routing``."""
    cells = {v: results.cell(setting, mixture, v).values() for v in results.variants(setting)}
    having = {v: [run for run in runs if run.result["routing"].get(key)] for v, runs in cells.items()}
    return {variant: runs for variant, runs in having.items() if runs}


def setting_of(results: Results, setting: str | None) -> str:
    known = results.settings
    if not known:
        raise NothingToDraw("no finished runs")
    if setting is None and len(known) > 1:
        raise UserError(f"several settings; name one of {known}")
    return choice("setting", setting, known, known[0])


def mixture_of(results: Results, setting: str | None, mixture: str | None) -> tuple[str, str]:
    """The named mixture, or the first."""
    setting = setting_of(results, setting)
    known = results.mixtures(setting)
    return setting, choice("mixture", mixture, known, known[0])


def scope_of(results: Results, setting: str | None, scope: str | None) -> tuple[str, Scope]:
    """The named scope, or the widest: the mean over all mixtures."""
    setting = setting_of(results, setting)
    scopes = {found.label: found for found in results.scopes(setting)}
    return setting, scopes[choice("scope", scope, scopes, list(scopes)[-1])]


def choice(what: str, name: str | None, known: Collection[str], default: str) -> str:
    if name is not None and name not in known:
        raise one_of(what, name, known)
    return default if name is None else name


def looks(results: Results, setting: str) -> dict[str, dict[str, Any]]:
    return styles([(variant, results.method(variant)) for variant in results.variants(setting)])

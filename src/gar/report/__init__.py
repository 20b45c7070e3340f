"""Any number of runs as one set of results, and its files: one HTML page, Markdown, LaTeX and CSV.

:mod:`gar.report.comparison` is the page of ``gar compare``.
"""

from gar.report import figures
from gar.report._write import write, write_diagnosis
from gar.report.results import Results, Scope, load

__all__ = ["Results", "Scope", "figures", "load", "write", "write_diagnosis"]

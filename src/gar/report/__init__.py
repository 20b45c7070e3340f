"""Any number of runs as one set of results, and its files: one HTML page, Markdown, LaTeX and CSV.

:mod:`gar.report.comparison` is the page of ``gar compare``, :mod:`gar.report.inspection` that of
``gar inspect``.
"""

from gar.report import figures
from gar.report._write import write, write_diagnosis
from gar.report.inspection import write_inspection
from gar.report.results import Results, Scope, load

__all__ = ["Results", "Scope", "figures", "load", "write", "write_diagnosis", "write_inspection"]

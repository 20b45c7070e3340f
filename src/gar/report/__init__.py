"""A loaded result set as files: one HTML page, Markdown, LaTeX and CSV."""

from gar.report.results import Results, load
from gar.report.write import write

__all__ = ["Results", "load", "write"]

"""A loaded result set as files: one HTML page, Markdown, LaTeX and CSV."""

from gar.experiments.report.write import write

__all__ = ["write"]

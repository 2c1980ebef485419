"""Run directory → one self-contained HTML page."""

from fovea.report.page import build

__all__ = ["build"]

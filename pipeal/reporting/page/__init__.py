"""Runs that explain themselves: what lies in a run's folder, read back and laid out on one page."""

from pipeal.reporting.page.folder import Run, Status, is_run, read_runs, runs_in
from pipeal.reporting.page.page import write_report

__all__ = ["Run", "Status", "is_run", "read_runs", "runs_in", "write_report"]

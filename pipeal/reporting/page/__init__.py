"""Runs that explain themselves: what lies in a run's folder, read back and laid out on one page."""

from pipeal.reporting.page.folder import is_run, read_runs, require_no_part, runs_in
from pipeal.reporting.page.page import write_report
from pipeal.reporting.page.run import Run, Status

__all__ = ["Run", "Status", "is_run", "read_runs", "require_no_part", "runs_in", "write_report"]

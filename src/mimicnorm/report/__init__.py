"""Results for people: a comparison's JSON as a table on the terminal and as one page that needs nothing else."""

from mimicnorm.report.page import page
from mimicnorm.report.summary import columns, rows, table

__all__ = ["columns", "page", "rows", "table"]

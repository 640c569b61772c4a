"""Results as a table, as files, as figures and as a page, from results.json alone."""

from alibi_jax.report.files import write
from alibi_jax.report.table import table

__all__ = ["table", "write"]

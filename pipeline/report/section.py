"""A section of a run's report as data: what the page draws and the terminal prints."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.report.charts import Chart
from pipeline.results import Answer

Curves = Mapping[str, Sequence[Mapping[str, float]]]
"""What each stage logged, by its name: a mapping of quantities a step."""


@dataclass(frozen=True)
class Cell:
    """A cell with a look of its own: a class of the page's style sheet."""

    text: str
    look: str


@dataclass(frozen=True)
class Table:
    """Rows of cells, the first of which names its row; a row's last cell takes what is left of a longer head."""

    rows: Sequence[Sequence[str | Cell]]
    head: Sequence[str | Cell] = ()
    meanings: Sequence[str] = ()
    """Of each heading but the first."""
    note: str = ""


@dataclass(frozen=True)
class Section:
    """What is said, then shown, in this order. A section with nothing to show is left out."""

    title: str
    text: str = ""
    tables: Sequence[Table] = ()
    charts: Sequence[Chart] = ()
    answers: Sequence[Answer] = ()

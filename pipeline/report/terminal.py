"""A report on the terminal: titles, tables and answers of its sections; their charts are for the page."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.markup import escape
from rich.table import Table as RichTable
from rich.text import Text

from pipeline.report.section import Cell, Section, Table

if TYPE_CHECKING:
    from rich.console import Console

    from pipeline.results import Answer, Piece

DRAFTED_STYLE = "bold green"


def print_sections(console: "Console", sections: Iterable[Section]) -> None:
    """Each section that has a table or an answer."""
    for section in sections:
        if section.tables:
            console.print(f"\n[bold]{escape(section.title)}[/bold]", highlight=False)
        for table in section.tables:
            print_table(console, table)
        print_conversation(console, section.answers)


def print_table(console: "Console", table: Table) -> None:
    """With its note below it."""
    console.print(terminal_table(table, width=console.width))
    if table.note:
        console.print(Text(table.note), soft_wrap=True)


def terminal_table(table: Table, *, width: int) -> RichTable:
    """A table of at most `width` characters where possible: one that is wider has its rows as columns."""
    lines = [[_text(cell) for cell in line] for line in (table.head, *table.rows)]
    widest = sum(max(map(len, cells)) + 3 for cells in zip(*lines, strict=True))
    if widest > width:
        lines = [list(cells) for cells in zip(*lines, strict=True)]
    shown = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, heading in enumerate(lines[0]):
        shown.add_column(Text(heading), justify="right" if index else "left", overflow="fold")
    for line in lines[1:]:
        shown.add_row(*map(Text, line))
    return shown


def _text(cell: str | Cell) -> str:
    return cell.text if isinstance(cell, Cell) else cell


def print_answer(console: "Console", pieces: "Sequence[Piece]") -> None:
    """In colour on a terminal, in [brackets] elsewhere."""
    text = Text()
    for piece in pieces:
        marked = piece.text if console.is_terminal or not piece.drafted else f"[{piece.text}]"
        text.append(marked, style=DRAFTED_STYLE if piece.drafted else "")
    console.print(text, soft_wrap=True)


def print_conversation(console: "Console", answers: "Sequence[Answer]") -> None:
    """Each prompt with its answers, and what the marks mean."""
    for prompt in dict.fromkeys(answer.prompt for answer in answers):
        console.print(f"\n[bold]> {escape(prompt)}[/bold]")
        for answer in (answer for answer in answers if answer.prompt == prompt):
            drafted = f", {answer.drafted_tokens} of them drafted and accepted" if answer.drafted_tokens else ""
            facts = f"{answer.served}: {answer.tokens} tokens{drafted}, {answer.seconds:.1f} s"
            console.print(f"[dim]{escape(facts)}[/dim]")
            print_answer(console, answer.pieces)

"""Answers with the draft's accepted tokens told apart from the served model's own."""

import codecs
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from pipeline.results import Answer, Piece

if TYPE_CHECKING:
    from rich.console import Console

DRAFTED_STYLE = "bold green"


def pieces_of(tokens: Iterable[tuple[bytes, bool]], text: str) -> tuple[Piece, ...]:
    """Groups (bytes of a token, drafted) into runs of the same hand that spell `text`.

    A character whose bytes lie in tokens of two hands belongs to the one that finishes it. Tokens past the end of
    `text`, such as the end-of-turn token, are left out.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    pieces: list[Piece] = []
    room = len(text)
    for spelled, drafted in tokens:
        part = decoder.decode(spelled)[:room]
        room -= len(part)
        if part and pieces and pieces[-1].drafted == drafted:
            pieces[-1] = Piece(pieces[-1].text + part, drafted)
        elif part:
            pieces.append(Piece(part, drafted))
    return tuple(pieces)


def print_answer(console: "Console", pieces: Sequence[Piece]) -> None:
    """In colour on a terminal, in [brackets] elsewhere."""
    from rich.text import Text

    text = Text()
    for piece in pieces:
        marked = piece.text if console.is_terminal or not piece.drafted else f"[{piece.text}]"
        text.append(marked, style=DRAFTED_STYLE if piece.drafted else "")
    console.print(text, soft_wrap=True)


def print_conversation(console: "Console", answers: Sequence[Answer]) -> None:
    """Each prompt with its answers, and what the marks mean."""
    for prompt in dict.fromkeys(answer.prompt for answer in answers):
        console.print(f"\n[bold]> {_escaped(prompt)}[/bold]")
        for answer in (answer for answer in answers if answer.prompt == prompt):
            drafted = f", {answer.drafted_tokens} of them drafted and accepted" if answer.drafted_tokens else ""
            facts = f"{answer.served}: {answer.tokens} tokens{drafted}, {answer.seconds:.1f} s"
            console.print(f"[dim]{_escaped(facts)}[/dim]")
            print_answer(console, answer.pieces)


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)

"""What was asked, and what was answered."""

from collections.abc import Sequence

from pipeline.report.section import Curves, Section
from pipeline.results import NoDetails, Result


def sections(results: Sequence[Result[NoDetails]], curves: Curves) -> list[Section]:
    """All answers together."""
    text = (
        "Asked over HTTP. Marked tokens were proposed by the draft and accepted by the model being served; the others "
        "are its own."
    )
    return [Section("Conversation", text, answers=[answer for result in results for answer in result.answers])]

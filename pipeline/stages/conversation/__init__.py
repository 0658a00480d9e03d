"""The published models answer over HTTP."""

from collections.abc import Sequence

from pipeline.report.section import Curves, Section
from pipeline.results import NoDetails, Result
from pipeline.stages.base import StageKind
from pipeline.stages.conversation.config import Conversation


def sections(results: Sequence[Result[NoDetails]], curves: Curves) -> list[Section]:
    """All answers together."""
    text = (
        "Asked over HTTP. Marked tokens were proposed by the draft and accepted by the model being served; the others "
        "are its own."
    )
    return [Section("Conversation", text, answers=[answer for result in results for answer in result.answers])]


KIND = StageKind("conversation", Conversation, NoDetails, sections)

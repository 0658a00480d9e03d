"""The published models answer over HTTP."""

from collections.abc import Sequence

from pipeline.report.section import Curves, Section
from pipeline.results import NoDetails, Result
from pipeline.stages.base import StageKind
from pipeline.stages.conversation.config import Conversation
from pipeline.stages.conversation.report import sections


class ConversationKind(StageKind[Conversation, NoDetails]):
    """Its answers are in every result's `answers`."""

    name, config, details = "conversation", Conversation, NoDetails

    def sections(self, results: Sequence[Result[NoDetails]], curves: Curves) -> list[Section]:
        return sections(results, curves)


KIND = ConversationKind()

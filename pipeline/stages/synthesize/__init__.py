"""Conversations that a model writes: prompts of a data set or its own, answered by the serving engine, and filtered."""

from pipeline.stages.base import StageKind
from pipeline.stages.synthesize.config import Synthesize, mistakes
from pipeline.stages.synthesize.report import SynthesizeDetails, sections

KIND = StageKind("synthesize", Synthesize, SynthesizeDetails, sections, mistakes, reads_documents=True)

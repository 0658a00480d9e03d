"""Mixture of depths: routers that let only part of the tokens into some layers."""

from pipeline.stages.base import StageKind
from pipeline.stages.mod.config import Mod
from pipeline.stages.mod.report import ModDetails, sections
from pipeline.stages.shared.config import mistakes

KIND = StageKind("mod", Mod, ModDetails, sections, mistakes, starts_from=lambda config: config.model)

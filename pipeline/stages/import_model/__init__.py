"""Imports a model that a recipe names: one stage for each entry of `models:`."""

from pipeline.results import NoDetails
from pipeline.stages.base import StageKind
from pipeline.stages.import_model.config import ModelSource, file_times

# Runs of the first release call it `teacher`; their keys and manifests hold that word.
KIND = StageKind("import_model", ModelSource, NoDetails, stamp=file_times, in_recipes=False, former_name="teacher")

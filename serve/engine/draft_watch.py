"""A newer draft, swapped in while requests run, and taken back where it is accepted less often.

A thread looks at the manifest of `EngineConfig.watch_draft`. When that names another artifact, it is read and checked
there; between two steps its weights are written over the old ones. These are kept until the new draft has been verified
on `watch_draft_tokens` tokens, and written back as soon as it is certain to be worse (serve/engine/drafts/trial.py). A
draft decides how fast the target is, never what it says: running requests go on, whatever becomes of it.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from model.files.artifact import MANIFEST_NAME, ArtifactError, open_artifact
from serve.config import EngineConfig
from serve.engine.drafts.base import Draft
from serve.engine.drafts.trial import MEMORY, Acceptance, is_worse
from serve.engine.loading import check_same_vocabulary, load_weights

CPU = torch.device("cpu")
"""Where weights wait: a GPU has other use for its memory."""
LOOK_S = 1.0
"""Between two looks at the manifest."""
log = logging.getLogger("potstill.engine")
Weights = Mapping[str, Tensor]


class Newer(NamedTuple):
    """A draft that has been read."""

    digest: str
    weights: Weights


@dataclass
class Trial:
    """What the weights of a newer draft are compared with."""

    newer: Newer
    old: Acceptance


class DraftWatch:
    """Of one engine; its own thread only reads files."""

    def __init__(
        self, config: EngineConfig, draft: Draft | None, swap: Callable[[Weights], None], *, dtype: torch.dtype
    ) -> None:
        """`swap` puts other weights under the draft, between two steps. ValueError, one sentence, where it cannot."""
        folder = config.draft_model or config.draft
        found = None if draft is None else draft.replaceable
        if found is None or folder is None:
            raise ValueError("--watch-draft needs a draft model with pages of its own, whose weights it can replace")
        self._config, self._draft, self._swap, self._dtype = config, found, swap, dtype
        self._acceptance = Acceptance()
        """Of the weights that are served now."""
        found.acceptance = self._acceptance
        self._path, self._num_tokens = Path(config.watch_draft or ""), config.watch_draft_tokens
        self._kept: Weights = load_weights(folder, found.config, dtype, CPU)
        """The weights that are known to be good."""
        self._trial: Trial | None = None
        self._found: queue.Queue[Newer] = queue.Queue(1)
        self.num_swaps = self.num_rollbacks = 0
        self._thread = threading.Thread(target=self._look, args=(_digest(Path(folder)),), name="draft", daemon=True)
        self._thread.start()

    def counts(self) -> dict[str, int]:
        """Fields of EngineStats."""
        return {
            "num_draft_swaps": self.num_swaps,
            "num_draft_rollbacks": self.num_rollbacks,
            "draft_on_trial": int(self._trial is not None),
        }

    def between_steps(self) -> None:
        """Swap, take back or keep, if it is time for that."""
        if self._trial is None:
            self._begin()
        elif is_worse(self._acceptance, self._trial.old):
            self._take_back(self._trial)
        elif self._acceptance.tested >= self._num_tokens:
            self._keep(self._trial)

    def _begin(self) -> None:
        if self._found.empty():
            return
        newer, old = self._found.get_nowait(), self._acceptance
        self._serve(newer.weights, Acceptance(memory=1.0))
        self._trial = Trial(newer, old)
        self.num_swaps += 1
        log.info("the draft %s of %s is on trial; the one before had %.3f of its tokens accepted",
                 newer.digest[:12], self._path, old.share)  # fmt: skip

    def _take_back(self, trial: Trial) -> None:
        share = self._acceptance.share
        self._serve(self._kept, trial.old)
        self._trial = None
        self.num_rollbacks += 1
        log.warning("the draft %s is taken back: %.3f of its tokens were accepted, %.3f of those of the one before",
                    trial.newer.digest[:12], share, trial.old.share)  # fmt: skip

    def _keep(self, trial: Trial) -> None:
        self._kept, self._trial = trial.newer.weights, None
        self._acceptance.memory = MEMORY
        log.info("the draft %s is kept: %.3f of its tokens were accepted, %.3f of those of the one before",
                 trial.newer.digest[:12], self._acceptance.share, trial.old.share)  # fmt: skip

    def _serve(self, weights: Weights, acceptance: Acceptance) -> None:
        self._swap(weights)
        self._acceptance = self._draft.acceptance = acceptance

    def _look(self, seen: str) -> None:
        """Read what is new; in the thread."""
        while True:
            time.sleep(LOOK_S)
            digest = _digest(self._path)
            if digest in ("", seen):
                continue
            seen = digest
            try:
                newer = Newer(digest, self._read())
            except (ValueError, OSError) as error:
                log.error("the draft in %s is left alone: %s", self._path, error)
            else:
                self._found.put(newer)

    def _read(self) -> Weights:
        check_same_vocabulary(self._config.model, str(self._path))
        weights = load_weights(self._path, self._draft.config, self._dtype, CPU)
        if weights.keys() != self._kept.keys():
            raise ValueError("it has other tensors than the draft that is served")
        return weights


def _digest(folder: Path) -> str:
    """Of the artifact there; empty where there is none, or none yet."""
    try:
        return open_artifact(folder, verify=False).digest if (folder / MANIFEST_NAME).exists() else ""
    except (ArtifactError, OSError):
        return ""

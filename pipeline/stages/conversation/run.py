"""Stage `conversation`: the published models answer over HTTP, the student alone and verified by its teacher."""

import logging

from pipeline.results import Answer, NoDetails, Result
from pipeline.stages.conversation.config import Conversation
from pipeline.stages.conversation.server import ask, running_server
from pipeline.stages.shared.context import StageContext

log = logging.getLogger(__name__)


def run(context: StageContext) -> Result[NoDetails] | None:
    """Starts the server once for each way of serving and asks every prompt."""
    if not context.processes.is_main:
        return None
    config: Conversation = context.stage.config
    answers: list[Answer] = []
    for verify in (None, config.verify) if config.verify else (None,):
        served = config.model if verify is None else f"{config.model} verified by {verify}"
        log.info("serving %s over HTTP and asking %d prompts", served, len(config.prompts))
        model = context.model(config.model)
        verifier = context.model(verify) if verify else None
        with running_server(model, verifier, name=verify or config.model) as address:
            answers += [
                ask(
                    address,
                    prompt,
                    served=served,
                    max_tokens=config.max_tokens,
                    temperature=config.temperature,
                    seed=config.seed,
                )
                for prompt in config.prompts
            ]
    return context.result(answers=answers)

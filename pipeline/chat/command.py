"""What `potstill chat` was told → who answers."""

import argparse
import os
from typing import Any

from model.startup import import_torch
from pipeline.chat.conversation import ChatSession, run_conversation
from pipeline.chat.models import ChatModel, LocalModel, RemoteModel
from pipeline.errors import UserError
from pipeline.run_folder import resolve_served
from serve.config import target_and_draft
from serve.sampling_params import SamplingParams


def chat(options: argparse.Namespace) -> int:
    """Talks until the user leaves; returns the exit code. UserError or SourceError for what cannot be asked."""
    if (options.model is None) == (options.url is None):
        raise UserError("Give either a MODEL or the --url of a server.")
    model = _local(options) if options.url is None else _remote(options)
    return run_conversation(ChatSession(model, options.system))


def _local(options: argparse.Namespace) -> ChatModel:
    for name in ("name", "api_key"):
        if getattr(options, name) is not None:
            raise UserError(f"--{name.replace('_', '-')} goes with --url.")
    served = resolve_served(options.model, options.verify)
    import_torch()  # which a conversation with a server does without
    from serve.llm import LLM

    model, draft = target_and_draft(served.model, served.verify)
    engine = LLM(
        model,
        draft=draft,
        dtype=options.dtype,
        device=options.device,
        kv_cache_dtype=served.kv_cache_dtype,
        max_num_seqs=1,
    )
    return LocalModel(served.name or options.model, engine, SamplingParams(**_sampling(options)))


def _remote(options: argparse.Namespace) -> ChatModel:
    if options.verify is not None:
        raise UserError("--verify goes with a MODEL; a server has chosen already.")
    key = options.api_key or os.environ.get("POTSTILL_API_KEY") or os.environ.get("OPENAI_API_KEY")
    return RemoteModel(options.url, options.name, key, _sampling(options))


def _sampling(options: argparse.Namespace) -> dict[str, Any]:
    wanted = {name: getattr(options, name) for name in ("max_tokens", "temperature", "top_p", "seed")}
    return {name: value for name, value in wanted.items() if value is not None}

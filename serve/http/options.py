"""What `potstill serve` can be told: its options, its command line (vLLM's spellings) and its YAML file.

No torch and no HTTP stack here: the command line is parsed before either is imported.
"""

import argparse
import ipaddress
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from model.files.sources import KNOWN, source_name
from serve.config import DRAFT_MODEL, DRAFTS, EngineConfig, target_and_draft
from serve.http.tools.registry import AUTO, NONE, REASONING_FORMATS, TOOL_PARSERS

METHODS = [name for name in DRAFTS if name != DRAFT_MODEL]
"""Of speculation, those that need no model."""
API_KEY_VARIABLE = "POTSTILL_API_KEY"
EVERYBODY = "all"
"""In place of names in label_consent."""


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """The most that one request may ask for; beyond it is a 400. Defaults are vLLM's where it has a limit."""

    max_n: int = 16_384
    """Choices of a prompt."""
    max_prompts: int = 1024
    """Prompts of one request to /v1/completions."""
    max_stop_strings: int = 4
    max_logprobs: int = 20
    """Most probable tokens reported at each position."""
    max_body_bytes: int = 4 * 2**20
    """Of a request's body, as it is sent and unpacked; beyond it is a 413."""


@dataclass(frozen=True)
class ServerOptions(RequestLimits):
    """How to serve one model over HTTP; what the engine is told stands in `engine` alone. Times in seconds."""

    engine: EngineConfig
    """Goes to the engine process as it is."""
    model_names: tuple[str, ...]
    """Names that requests may use for the model; the first is the one that responses carry."""
    host: str = "127.0.0.1"
    """Address to listen on. Other than loopback, it needs api_keys or allow_unauthenticated."""
    port: int = 8000
    """0 takes a free port."""
    api_keys: tuple[str, ...] = ()
    api_keys_file: str | None = None
    """JSON file of further keys, by name, with weights, limits and classes: serve/http/accounts.py."""
    allow_unauthenticated: bool = False
    allowed_origins: tuple[str, ...] = ()
    """Web pages of these origins may call the server from a browser; ("*",): those of all. None may unless named."""
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    """What such pages may send."""
    allow_credentials: bool = False
    """Whether browsers may send what they store for the server."""
    allowed_lora_path: str | None = None
    """Clients may load adapters from below this folder, and unload them; None: they may not. Needs enable_lora."""
    label_consent: tuple[str, ...] = ()
    """Whose answers are stored in engine.label_folder, unless a request says `store: false`: accounts by name (the
    first of api_keys is "key1"), or EVERYBODY. Nobody else's are."""
    response_cache_bytes: int | None = None
    """Keep answers to greedy and seeded requests in so many bytes, and give them again; None: keep none."""
    chat_template: str | None = None
    """File that replaces the model's chat template."""
    tool_call_parser: str = AUTO
    """In which format the model calls tools, one of TOOL_PARSERS; AUTO: as its chat template shows; NONE: in none."""
    reasoning_parser: str = AUTO
    """How it marks its thoughts, one of REASONING_FORMATS; AUTO and NONE likewise."""
    max_queue: int = 64
    """Most choices that may wait for a place in the running batch; more are refused with 429."""
    queue_wait_s: float = 30.0
    """A request that has waited this long is refused with 429."""
    drain_s: float = 30.0
    """After SIGTERM, how long running requests may take to finish."""
    health_timeout_s: float = 10.0
    """How long /health waits for the engine's loop; longer than the longest step."""
    engine_timeout_s: float = 300.0
    """An engine that has ended no step for this long is killed and replaced. Loading and warming up do not count."""
    spare_engine: bool = True
    """Whether a second process stands by, with torch imported and no model, to replace an engine sooner: 150 MiB."""
    otlp_traces_endpoint: str | None = None
    """Collector of OpenTelemetry traces, such as http://localhost:4318/v1/traces; needs potstill[otel]."""
    price_per_hour: float | None = None
    """What the machine costs an hour, in any currency, for the metric of what tokens cost."""
    replicas: tuple[int, int] | None = None
    """Fewest and most servers of the model on a Ray cluster; None: one, without Ray. Needs potstill[ray]."""
    log_level: str = "info"

    def __post_init__(self) -> None:
        if self.replicas is not None:
            self._check_replicas(*self.replicas)
        for name in ("queue_wait_s", "health_timeout_s", "engine_timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")
        if self.price_per_hour is not None and self.price_per_hour < 0:
            raise ValueError(f"price_per_hour must not be negative, but is {self.price_per_hour}")
        for name in ("max_n", "max_prompts", "max_body_bytes", "response_cache_bytes"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("max_queue", "drain_s", "port", "max_stop_strings", "max_logprobs"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, but is {getattr(self, name)}")
        if self.port > 65_535:
            raise ValueError(f"port must be at most 65535, but is {self.port}")
        if taken := [name for name in self.engine.adapters if name in self.model_names]:
            raise ValueError(f"--adapter {taken[0]}: this is the name of the model itself")
        if self.allowed_lora_path is not None and not self.engine.enable_lora:
            raise ValueError("--allowed-lora-path needs --enable-lora: without it no adapter can be loaded later")
        if self.allowed_lora_path is not None and not Path(self.allowed_lora_path).is_dir():
            raise ValueError(f"--allowed-lora-path {self.allowed_lora_path}: there is no such folder")
        if self.allow_credentials and "*" in self.allowed_origins:
            raise ValueError('allow_credentials needs origins by name: with "*" any page could use them')
        if (self.engine.label_folder is None) != (not self.label_consent):
            raise ValueError("--label-folder and --label-consent belong together: where answers are stored, and whose")
        if any(not key.strip() for key in self.api_keys):
            raise ValueError("an API key is empty")
        if not (_is_loopback(self.host) or self.has_keys or self.allow_unauthenticated):
            raise ValueError(
                f"host {self.host} is reachable from other machines: give --api-key (or {API_KEY_VARIABLE}), "
                "or say --allow-unauthenticated"
            )

    def _check_replicas(self, least: int, most: int) -> None:
        if not 1 <= least <= most:
            raise ValueError(f"--replicas {least}..{most}: there must be at least 1, and no fewer than that at most")
        if self.port == 0:
            raise ValueError("--port 0: with --replicas Ray listens, which takes the port that it is given")
        if self.engine.label_folder is not None:
            raise ValueError("--label-folder belongs to one server: several --replicas cannot share it")

    @property
    def has_keys(self) -> bool:
        """Whether requests need a key."""
        return bool(self.api_keys or self.api_keys_file)


ENGINE, SERVER = ({field.name for field in fields(kind)} for kind in (EngineConfig, ServerOptions))
RESOLVED = {"verify", "speculative_config", "served_model_name", "config"}
"""Options that are no fields: `options_from_arguments` turns them into some."""


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """Add MODEL and the options of `potstill serve`. Options not given stay out of the namespace."""

    def add(flag: str, explanation: str, **settings: Any) -> None:
        name = settings.get("dest", flag.lstrip("-").replace("-", "_"))
        if name not in ENGINE | SERVER | RESOLVED:
            raise TypeError(f"{flag} sets {name}, which no option is called")
        default = getattr(EngineConfig if name in ENGINE else ServerOptions, name, None)
        shown = "" if default in (None, (), False, True) else f" (default: {default})"
        parser.add_argument(flag, default=argparse.SUPPRESS, help=explanation + shown, **settings)

    parser.add_argument("model", metavar="MODEL", help=KNOWN)
    add("--host", "address to listen on")
    add("--port", "port to listen on; 0 takes a free one", type=int)
    add("--replicas", "serve on a Ray cluster with so many copies of the model, or LEAST..MOST, as there is work",
        type=_replicas, metavar="N")  # fmt: skip
    add("--served-model-name", "names that requests use for the model", nargs="+", metavar="NAME")
    add("--dtype", "auto, float32, bfloat16 or float16")
    add("--kv-cache-dtype", "auto, or int8 or fp8: keys and values in 8 bits, so that more tokens fit")
    add("--activations", "auto, or int8: round what weights in 4 or 8 bits multiply to 8 bits, faster on CPUs")
    add("--device", "auto, cpu, cuda or cuda:N")
    add("--tensor-parallel-size", "processes, each with a GPU of its own, that share the model's weights and KV pages",
        type=int, metavar="N")  # fmt: skip
    add("--pipeline-parallel-size", "groups of such processes that share its layers, one behind the other", type=int,
        metavar="N")  # fmt: skip
    add("--max-model-len", "most tokens of prompt and output together", type=int, metavar="TOKENS")
    add("--gpu-memory-utilization", "fraction of the GPU's memory to use", type=float, metavar="FRACTION")
    add("--kv-cache-bytes", "memory for KV pages, such as 2G", type=_size, metavar="BYTES")
    add("--max-num-seqs", "most sequences running at once", type=int, metavar="N")
    add("--max-num-batched-tokens", "most tokens computed in one step", type=int, metavar="N")
    add("--no-enable-prefix-caching", "do not share the KV pages of equal prefixes", action="store_false",
        dest="enable_prefix_caching")  # fmt: skip
    add("--verify", "serve TARGET's distribution, with MODEL as its draft", metavar="TARGET")
    methods = " or ".join(METHODS)
    speculative = f'{methods}, or JSON: {{"method": ..., "model": DRAFT, "num_speculative_tokens": N}}'
    add("--speculative-config", speculative, type=_speculative)
    add("--adapter", "LoRA adapter that requests choose as model NAME; repeatable", action="append", dest="adapters",
        type=_adapter, metavar="NAME=FOLDER")  # fmt: skip
    add("--enable-lora", "keep room for adapters that come and go while the server runs", action="store_true")
    add("--max-loras", "most adapters in one batch, with --enable-lora", type=int, metavar="N")
    add("--max-cpu-loras", "most adapters loaded at once; the next takes the place of that used longest ago",
        type=int, metavar="N")  # fmt: skip
    add("--max-lora-rank", "largest rank of an adapter, with --enable-lora", type=int, metavar="NUMBER")
    add("--allowed-lora-path", "let clients load adapters from below FOLDER by /v1/load_lora_adapter", metavar="FOLDER")
    add("--seed", "seed of requests that bring none", type=int)
    add("--api-key", f"key that requests must bring; repeatable; also {API_KEY_VARIABLE}", action="append",
        dest="api_keys", metavar="KEY")  # fmt: skip
    add("--api-keys-file", "JSON file of keys by name, with weights, limits and classes of requests", metavar="FILE")
    add("--allow-unauthenticated", "listen beyond loopback without a key", action="store_true")
    origins = """JSON list of origins whose pages may call the server, such as '["https://example.org"]'; none"""
    add("--allowed-origins", origins, type=_names, metavar="JSON")
    add("--allowed-methods", "JSON list of methods that such pages may use; all", type=_names, metavar="JSON")
    add("--allowed-headers", "JSON list of headers that such pages may send; all", type=_names, metavar="JSON")
    add("--allow-credentials", "let browsers send what they store for the server", action="store_true")
    add("--watch-draft", "artifact folder: a newer draft that is published there is swapped in while requests run, "
        "and taken back if fewer of its tokens are accepted", metavar="FOLDER")  # fmt: skip
    add("--watch-draft-tokens", "verified tokens after which it has proved itself", type=int, metavar="N")
    add("--label-folder", "store there, for training, what the model says of its answers to those who consent; "
        "nothing is stored without it", metavar="FOLDER")  # fmt: skip
    add("--label-bytes", "most that this folder may take, such as 4G; the oldest go first", type=_size, metavar="BYTES")
    add("--label-consent", "whose answers are stored, unless a request says store: false: keys by the names that logs "
        f"have for them, such as key1, or {EVERYBODY}; nobody's", nargs="+", metavar="NAME")  # fmt: skip
    add("--response-cache-bytes", "keep answers to greedy and seeded requests in so much memory, such as 64M, and give "
        "them again to the same account; none", type=_size, metavar="BYTES")  # fmt: skip
    add("--chat-template", "Jinja file that replaces the model's chat template", metavar="FILE")
    add("--tool-call-parser", "in which format the model calls tools: auto reads it off the chat template; none: "
        "calls stay text", choices=[AUTO, NONE, *TOOL_PARSERS])  # fmt: skip
    add("--reasoning-parser", "how the model marks its thoughts; auto and none likewise",
        choices=[AUTO, NONE, *REASONING_FORMATS])  # fmt: skip
    _add_limits(add)
    add("--otlp-traces-endpoint", "send OpenTelemetry traces there, as OTLP over HTTP", metavar="URL")
    add("--price-per-hour", "what the machine costs an hour, to show what tokens cost", type=float, metavar="PRICE")
    add("--log-level", "debug, info, warning or error", choices=["debug", "info", "warning", "error"])
    add("--config", "YAML file of these options, without the dashes in front; the command line wins", metavar="FILE")


def _add_limits(add: Callable[..., None]) -> None:
    """What a request may ask for, and how long anything may take."""
    add("--max-queue", "most sequences waiting; more are refused with 429", type=int, metavar="N")
    add("--max-n", "most choices that a request may ask for", type=int, metavar="N")
    add("--max-prompts", "most prompts in one request", type=int, metavar="N")
    add("--max-stop-strings", "most stop strings of a request", type=int, metavar="N")
    add("--max-logprobs", "most log-probabilities reported at each position", type=int, metavar="N")
    add("--max-body-bytes", "largest body of a request, such as 4M", type=_size, metavar="BYTES")
    add("--queue-wait-s", "longest wait for a place in the batch, seconds", type=float, metavar="SECONDS")
    add("--drain-s", "how long running requests may go on after SIGTERM, seconds", type=float, metavar="SECONDS")
    add("--health-timeout-s", "how long /health waits for the engine, seconds", type=float, metavar="SECONDS")
    add("--engine-timeout", "replace an engine that has ended no step for this long, seconds", type=float,
        dest="engine_timeout_s", metavar="SECONDS")  # fmt: skip
    add("--no-spare-engine", "let no process stand by for an engine that has to be replaced; it takes 150 MiB",
        dest="spare_engine", action="store_false")  # fmt: skip


def options_from_arguments(namespace: argparse.Namespace) -> ServerOptions:
    """The options of a parsed command line: YAML file, then command line, then the environment for a missing key.

    Raises ValueError with one sentence for what is wrong. Attributes of `namespace` that are no options are ignored.
    """
    given = {name: value for name, value in vars(namespace).items() if name in ENGINE | SERVER | RESOLVED}
    config = given.pop("config", None)
    values = (_from_yaml(Path(config)) if config else {}) | given
    values |= values.pop("speculative_config", None) or {}
    if not values.get("api_keys") and os.environ.get(API_KEY_VARIABLE):
        values["api_keys"] = [os.environ[API_KEY_VARIABLE]]
    values["api_keys"] = tuple(values.get("api_keys") or ())
    values["label_consent"] = tuple(values.get("label_consent") or ())
    values["adapters"] = _by_name(values.get("adapters") or [])
    values["model_names"] = tuple(values.pop("served_model_name", None) or (source_name(values["model"]),))
    verify, draft = values.pop("verify", None), values.pop("draft", None)
    if verify is not None and draft in DRAFTS and "draft_model" not in values:
        values["draft_model"], values["model"], values["draft"] = values["model"], verify, draft
    else:
        values["model"], values["draft"] = target_and_draft(values["model"], verify, draft)
    engine = EngineConfig(**{name: values.pop(name) for name in ENGINE & values.keys()})
    return ServerOptions(engine, **values)


def options_from_words(words: list[str]) -> ServerOptions:
    """The options of a command line that somebody else reads. ValueError where `potstill serve` would end."""
    parser = _FileParser(prog="potstill serve", add_help=False, allow_abbrev=False)
    add_serve_arguments(parser)
    return options_from_arguments(parser.parse_args(words))


def _from_yaml(path: Path) -> dict[str, Any]:
    """The options of a YAML file, read exactly as the command line would read them."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    if not path.is_file():
        raise ValueError(f"--config {path}: no such file")
    try:
        content = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except (OmegaConfBaseException, YAMLError, ValueError) as error:
        raise ValueError(f"--config {path}: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"--config {path} must hold option names and values")
    parser = _FileParser(prog=f"--config {path}", add_help=False, allow_abbrev=False)
    add_serve_arguments(parser)
    words = [word for name, value in content.items() for word in _words(str(name), value)]
    values = vars(parser.parse_args(["", *words]))
    del values["model"]
    return values


class _FileParser(argparse.ArgumentParser):
    """Reads the words of a file: a mistake is a ValueError, where on a command line it ends the program."""

    def error(self, message: str) -> Any:
        raise ValueError(f"{self.prog}: {message}")


def _words(name: str, value: Any) -> list[str]:
    """One entry of the file in the form of the command line."""
    flag = f"--{name.replace('_', '-')}"
    if flag == "--config":
        raise ValueError("a --config file cannot name another")
    if isinstance(value, bool):
        return [flag] if value else []
    if isinstance(value, dict):
        return [f"{flag}={json.dumps(value)}"]
    if isinstance(value, list):
        if flag.startswith("--allowed-"):
            return [f"{flag}={json.dumps(value)}"]
        if flag in ("--api-key", "--adapter"):
            return [f"{flag}={item}" for item in value]
        return [flag, *map(str, value)]
    return [f"{flag}={value}"]


def _replicas(text: str) -> tuple[int, int]:
    """--replicas as the fewest and the most."""
    least, dots, most = text.partition("..")
    try:
        return int(least), int(most if dots else least)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of replicas; write 2 or 2..8") from None


def _adapter(text: str) -> tuple[str, str]:
    """--adapter as name and folder."""
    name, _, folder = text.partition("=")
    if not name or not folder:
        raise argparse.ArgumentTypeError(f"{text!r} is no adapter; write NAME=FOLDER")
    return name, folder


def _names(text: str) -> tuple[str, ...]:
    """A JSON list of strings, as vLLM takes it."""
    try:
        names = json.loads(text)
    except json.JSONDecodeError:
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON list of strings, such as '[\"*\"]'")
    return tuple(names)


def _by_name(adapters: list[tuple[str, str]]) -> dict[str, str]:
    folders = dict(adapters)
    if len(folders) < len(adapters):
        names = [name for name, _ in adapters]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"--adapter {twice} is given twice")
    return folders


def _size(text: str) -> int:
    """ "512M" as bytes; K, M and G are powers of 1024."""
    number, factor = text.upper().removesuffix("IB").removesuffix("B"), 1
    if number and number[-1] in "KMG":
        number, factor = number[:-1], 1024 ** ("KMG".index(number[-1]) + 1)
    try:
        size = int(float(number) * factor)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 2147483648, 2048M or 2G") from None
    if size <= 0:
        raise argparse.ArgumentTypeError(f"a size must be positive, not {text}")
    return size


def _speculative(text: str) -> dict[str, Any]:
    """--speculative-config as fields of EngineConfig."""
    if text in METHODS:
        return {"draft": text}
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        methods = " or ".join(METHODS)
        raise argparse.ArgumentTypeError(f"{text!r} is neither {methods} nor JSON: {error}") from None
    if not isinstance(value, dict) or set(value) - {"model", "method", "num_speculative_tokens", "num_layers"}:
        raise argparse.ArgumentTypeError('expected {"model": ..., "num_speculative_tokens": ...} and nothing else')
    method = value.get("method", DRAFT_MODEL)
    if method not in DRAFTS:
        raise argparse.ArgumentTypeError("method must be " + " or ".join(f'"{name}"' for name in DRAFTS))
    model, tokens = value.get("model"), value.get("num_speculative_tokens")
    if model is not None and not isinstance(model, str):
        raise argparse.ArgumentTypeError("model must be a string")
    layers = value.get("num_layers")
    for name, number in (("num_speculative_tokens", tokens), ("num_layers", layers)):
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 0):
            raise argparse.ArgumentTypeError(f"{name} must be a whole number")
    chosen = {"draft": model} if method == DRAFT_MODEL else {"draft": method, "draft_model": model}
    chosen = {name: value for name, value in (chosen | {"draft_layers": layers}).items() if value is not None}
    return chosen | {"num_speculative_tokens": tokens}


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False

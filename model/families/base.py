"""What a family of models is: how its `config.json` maps to a `ModelConfig`, and what its layers are made of.

Everything here is true of a whole family; what differs from checkpoint to checkpoint are fields of `ModelConfig`.
A new family is a file beside this one and a line in `registry.py`; what llama.cpp calls it stands in
model/formats/gguf/architectures.py.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, NamedTuple

Raw = Mapping[str, Any]
"""The contents of a config.json."""
Fields = Mapping[str, Any]
"""Those of a `ModelConfig`, by name."""


class NormNames(NamedTuple):
    """Where a layer has norms, by the names that checkpoints give them; None: there it has none.

    The same name stands at different places in different families.
    """

    before_attention: str | None = "input_layernorm"
    behind_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    behind_mlp: str | None = None


LLAMA_NORMS = NormNames()
NORMS_AROUND = NormNames(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)
NORMS_BEHIND = NormNames(None, "post_attention_layernorm", None, "post_feedforward_layernorm")


def _nothing(of: Mapping[str, Any]) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Family:
    """One family. What is not said is as in Llama."""

    name: str
    """`model_type` in config.json."""
    architecture: str
    read: Callable[[Raw], dict[str, Any]] = _nothing
    """Fields of `ModelConfig` that differ from what all families share; raises ConfigError."""
    write: Callable[[Fields], dict[str, Any]] = _nothing
    """What config.json has besides the shared fields, to be read back by `read` and by transformers."""
    norms: NormNames = LLAMA_NORMS
    norms_whole_projections: bool = False
    """Whether norms of queries and keys, where there are some, are over all heads together."""

    norm_offset: float = 0.0
    """What is added to the weights of all norms."""
    activation: str = "silu"
    """Of the MLP's gate, as config.json names it."""
    joins_projections: bool = False
    """Whether one matrix makes queries, keys and values, and one gate and up."""
    names_in_files: Mapping[str, str] = field(default_factory=dict)
    """Parts of tensors' names that files spell otherwise: ours and theirs."""

    def name_in_files(self, name: str) -> str:
        """Of a tensor or layer, by its name in the model."""
        return _renamed(name, self.names_in_files.items())

    def name_in_model(self, name: str) -> str:
        """The inverse."""
        return _renamed(name, ((theirs, ours) for ours, theirs in self.names_in_files.items()))

    @property
    def num_norms(self) -> int:
        """Of a layer's stream and of what its blocks add."""
        return sum(name is not None for name in self.norms)

    @property
    def has_norms_before_alone(self) -> bool:
        """Whether each block reads a norm of the stream, and adds to the stream just what it computes."""
        return self.has_norms_before and self.norms.behind_attention is None and self.norms.behind_mlp is None

    @property
    def has_norms_before(self) -> bool:
        """Whether each block reads a norm of the stream."""
        return self.norms.before_attention is not None and self.norms.before_mlp is not None


def _renamed(name: str, pairs: Iterable[tuple[str, str]]) -> str:
    return reduce(lambda made, pair: made.replace(*pair), pairs, f"{name}.")[:-1]


def all_layers(raw: Raw, value: Any) -> tuple[Any, ...]:
    """The same for every layer."""
    return (value,) * raw["num_hidden_layers"]


def windows_of_layer_types(raw: Raw, *, first: int = 0) -> tuple[int | None, ...]:
    """From `layer_types`; without that, in layers from `first` on where `use_sliding_window` says so."""
    window = raw.get("sliding_window")
    if window is not None and raw.get("layer_types"):
        return tuple(window if kind == "sliding_attention" else None for kind in raw["layer_types"])
    if window is None or not raw.get("use_sliding_window"):
        return all_layers(raw, None)
    return tuple(window if layer >= first else None for layer in range(raw["num_hidden_layers"]))


def layer_type_fields(fields: Fields) -> dict[str, Any]:
    """What `windows_of_layer_types` reads."""
    window = one_window(fields)
    layer_types = ["full_attention" if own is None else "sliding_attention" for own in fields["windows"]]
    return {"use_sliding_window": window is not None, "sliding_window": window, "layer_types": layer_types}


def one_window(fields: Fields) -> int | None:
    """That of the layers that have one."""
    return next((window for window in fields["windows"] if window is not None), None)

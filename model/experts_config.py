"""Which layers of a model have experts in place of their MLP, and how tokens are shared out among them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from model.config_fields import MOST_CHANNELS, ConfigError, is_count, shown

MOST_EXPERTS = 1 << 16


@dataclass(frozen=True)
class MixtureOfExperts:
    """Of all layers that have experts; model/mlp.py says what is computed."""

    layers: tuple[int, ...]
    """Their indices, ascending; the other layers have an MLP."""
    num_experts: int
    experts_per_token: int
    intermediate_size: int
    """Neurons of each expert."""
    normalizes: bool
    """Whether the weights of a token's experts are scaled to a sum of 1."""
    shared_intermediate_size: int | None = None
    """Neurons of an expert that every token passes too; None: there is none."""

    def __post_init__(self) -> None:
        if self.experts_per_token > self.num_experts:
            raise ConfigError(
                f"config.json sends each token to {self.experts_per_token} experts (num_experts_per_tok) of the "
                f"{self.num_experts} that there are."
            )

    @property
    def neurons_per_token(self) -> int:
        """That one token passes in a layer."""
        return self.experts_per_token * self.intermediate_size + (self.shared_intermediate_size or 0)

    def num_parameters(self, hidden_size: int) -> int:
        """Of one layer's experts, their router, and the shared expert with its gate."""
        shared = self.shared_intermediate_size
        routed = self.num_experts * hidden_size * (3 * self.intermediate_size + 1)
        return routed + (0 if shared is None else hidden_size * (3 * shared + 1))

    def keep_layers(self, keep: tuple[int, ...]) -> "MixtureOfExperts | None":
        """What is left when a model keeps only its layers `keep`; None without experts."""
        layers = tuple(new for new, old in enumerate(keep) if old in self.layers)
        return replace(self, layers=layers) if layers else None


def count_in(raw: Mapping[str, Any], name: str, *others: str, most: int = MOST_CHANNELS) -> int:
    """A size that a family's config.json must have, by the name or by one of the others; raises ConfigError."""
    name = next((other for other in (name, *others) if other in raw), name)
    if name not in raw:
        raise ConfigError(f"config.json has no field {name!r}.")
    if not is_count(raw[name], most):
        raise ConfigError(f"config.json has {name} {shown(raw[name])}; it must be a whole number from 1 to {most}.")
    return raw[name]


def layers_with_experts(raw: Mapping[str, Any]) -> tuple[int, ...]:
    """As `decoder_sparse_step` and `mlp_only_layers` say; raises ConfigError."""
    step = raw.get("decoder_sparse_step", 1)
    dense = raw.get("mlp_only_layers") or []
    if not is_count(step, MOST_CHANNELS):
        raise ConfigError(f"config.json has decoder_sparse_step {shown(step)}; it must be a positive whole number.")
    if not isinstance(dense, list):
        raise ConfigError(f"config.json has mlp_only_layers {shown(dense)}; it must be a list of layer numbers.")
    layers = range(raw["num_hidden_layers"])
    return tuple(layer for layer in layers if layer not in dense and (layer + 1) % step == 0)


def sparse_layer_fields(experts: MixtureOfExperts | None, num_layers: int) -> dict[str, Any]:
    """What `layers_with_experts` reads."""
    sparse = () if experts is None else experts.layers
    return {"decoder_sparse_step": 1, "mlp_only_layers": [one for one in range(num_layers) if one not in sparse]}

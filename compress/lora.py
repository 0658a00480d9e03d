"""Adapters as verbs: inject one, start it from the quantization error, merge it into the base, take it out again.

    inject      freeze the base and attach fresh adapters (model/lora.py)
    LoftQ       Q = q(W − s·B A), then s·B A = the best matrix of rank r for W − Q; again, a few times
    merge       W' = dequantized base + s·B A, in fp32; then a dense model, or a quantized one again

An adapter was trained against the dequantized base, so it is merged into that one and never into the model that the
base was made from. Quantized again it may be lost: base weights lie on the grid of their blocks, and an update that is
small against the gaps rounds away, so compare before publishing.

Sources: LoftQ https://arxiv.org/abs/2310.08659.

Legend: N output features, K input features, r rank.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from model.files.adapter import Adapter
from model.files.checkpoint import TensorFiles, tensor_shapes
from model.lora import Lora, LoraConfig, LoraError, adapted_layers, attach_lora
from model.quantized import QuantizedLinear, quantized_layers, set_quantized
from model.transformer import Transformer
from model.unmade import when_made

EMBEDDING = "model.embed_tokens"
_SMALLEST = 1e-20


def inject(model: Transformer, config: LoraConfig, *, seed: int = 0, dense: TensorFiles | None = None) -> list[str]:
    """Freezes the model and attaches a fresh adapter, which alone is trainable; returns the adapted layers' names.

    `dense` holds the weights before quantization, for init "loftq". Raises LoraError for a target that matches no
    layer, a model that has an adapter, or LoftQ where it does not apply.
    """
    if config.init == "loftq" and dense is None:
        raise LoraError("LoftQ starts from the quantization error; it needs the weights before quantization.")
    names = attach_lora(model, config, seed=seed)
    model.requires_grad_(False)
    for layer in adapted_layers(model).values():
        layer.lora.requires_grad_(True)
    if config.init == "loftq" and dense is not None:
        start_loftq(model, dense)
    return names


def start_loftq(model: Transformer, dense: TensorFiles, *, iterations: int = 1) -> None:
    """Sets the adapter of each quantized layer so that base and adapter together come closer to the weights `dense`.

    One iteration leaves the base as it is. More change it: the model must then be saved as the adapter's base.
    Raises LoraError if no adapted linear layer is quantized.
    """
    if not _adapted_and_quantized(model):
        raise LoraError("LoftQ starts from the quantization error; no adapted layer of this model is quantized.")
    when_made(model, partial(_start_part, dense=dense, iterations=iterations))


@torch.no_grad()
def _start_part(part: nn.Module, prefix: str, *, dense: TensorFiles, iterations: int) -> None:
    for name, layer in _adapted_and_quantized(part, prefix).items():
        weight, lora = dense.read(f"{name}.weight").to(layer.device).float(), layer.lora
        _set_low_rank(lora, weight - layer.weight.dequantize())
        for _ in range(iterations - 1):
            layer.weight = layer.format.quantize(weight - lora.scale * (lora.b @ lora.a))
            _set_low_rank(lora, weight - layer.weight.dequantize())
        lora.reset_magnitude(layer)


def _adapted_and_quantized(part: nn.Module, prefix: str = "") -> dict[str, Any]:
    return {name: layer for name, layer in adapted_layers(part, prefix).items() if isinstance(layer, QuantizedLinear)}


def merge(model: Transformer, *, dtype: torch.dtype = torch.bfloat16) -> Transformer:
    """A new dense model that does alone what base and adapter do together, up to rounding to `dtype`.

    The model given is left as it is. Raises LoraError if it has no adapter, or one on tied embeddings.
    """
    with torch.device("meta"):
        merged = Transformer(model.config)
    weights = {name: source().to(dtype) for name, source in merged_weights(model).items()}
    merged.load_state_dict(weights, assign=True)
    return merged.requires_grad_(True).eval()


def merged_weights(model: Transformer) -> dict[str, Callable[[], Tensor]]:
    """What makes each weight of the merged model, by name, fp32 where it was adapted or quantized.

    `write_checkpoint` takes this, and then holds one shard at a time. See `merge` for the errors.
    """
    adapted = adapted_layers(model)
    if not adapted:
        raise LoraError("The model has no adapter to merge.")
    if model.lm_head is None and EMBEDDING in adapted:
        raise LoraError("The adapter of tied embeddings changes the input only; merged, it would change the head too.")
    return {name: partial(_merged, model, name) for name in tensor_shapes(model.config)}


@torch.no_grad()
def merge_requantized(model: Transformer, *, dtype: torch.dtype = torch.bfloat16) -> Transformer:
    """A new model like `merge`'s quantized as its base is. Most of a small update is lost."""
    merged = merge(model, dtype=torch.float32)
    for name, layer in quantized_layers(model).items():
        dense: Any = merged.get_submodule(name)
        set_quantized(merged, name, layer.format.quantize(dense.weight.detach()), layer.format)
    return merged.to(dtype)


@torch.no_grad()
def unmerge(model: Transformer, adapter: Adapter) -> Transformer:
    """Takes a merged adapter out of a dense model, in place, up to the rounding of its weights; returns the model.

    Raises LoraError for DoRA, whose merged weight no longer tells the length that the base's rows had, and where the
    model lacks a layer or has it quantized or in another shape.
    """
    if adapter.config.dora:
        raise LoraError("A merged DoRA cannot be taken out: the lengths of the base's rows are lost.")
    updates = {}
    for name, tensors in adapter.layers.items():
        weight = getattr(dict(model.named_modules()).get(name), "weight", None)
        update = adapter.config.scale * (tensors.b @ tensors.a)
        update = update.t() if name == EMBEDDING else update
        if not isinstance(weight, nn.Parameter) or weight.shape != update.shape:
            raise LoraError(f"The model has no dense weight {name} of the shape {list(update.shape)}.")
        updates[name] = weight, update
    for weight, update in updates.values():
        weight.copy_(weight.float() - update.to(weight.device))
    return model


@torch.no_grad()
def low_rank(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """b [N, r] and a [r, K] with b a the best matrix of rank r for `matrix` [N, K], by Frobenius norm; fp32.

    The leading eigenvectors U of the smaller of R Rᵀ and Rᵀ R give it as U (Uᵀ R). Both factors have the same norm.
    """
    upright = matrix.shape[0] > matrix.shape[1]
    wide = (matrix.t() if upright else matrix).double()
    vectors = torch.linalg.eigh(wide @ wide.t()).eigenvectors[:, -rank:]
    right = vectors.t() @ wide
    roots = right.norm(dim=1).clamp(min=_SMALLEST).sqrt()
    left, right = vectors * roots, right / roots[:, None]
    if upright:
        left, right = right.t(), left.t()
    return _padded(left.float().t(), rank).t(), _padded(right.float(), rank)


def _padded(factor: Tensor, rank: int) -> Tensor:
    """[r, x] where the matrix has fewer directions than the rank."""
    return nn.functional.pad(factor, (0, 0, 0, rank - len(factor)))


def _set_low_rank(lora: Lora, residual: Tensor) -> None:
    b, a = low_rank(residual, len(lora.a))
    root = lora.scale**0.5
    lora.b.copy_(b / root)
    lora.a.copy_(a / root)


@torch.no_grad()
def _merged(model: Transformer, name: str) -> Tensor:
    layer, _, leaf = name.rpartition(".")
    module: Any = model.get_submodule(layer)
    weight = getattr(module, leaf)
    weight = weight if isinstance(weight, Tensor) else weight.dequantize()
    lora = module.lora if leaf == "weight" and hasattr(module, "lora") else None
    return weight.detach() if lora is None else lora.merged(weight.detach())

"""Scales of an FP8 cache, found on a text: those of its largest keys and values, which the oracle rotates by itself."""

from functools import partial

import pytest
import torch
from torch import Tensor

from compress.mod import set_thresholds
from compress.quantize.cache import calibrated_cache_scales
from compress.residual_stream import layers_of
from model.attention import PackedAttention
from model.transformer import Transformer
from tests.compress.conversions import Text, texts
from tests.serve.test_routed import routed_model
from tests.tiny import tiny_model


def rotated(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Keys [T, Hkv, d] as complex numbers that are turned, fp64 [T, Hkv, d/2] complex."""
    half = x.shape[-1] // 2
    angles = positions.double()[:, None] * theta ** (-torch.arange(half).double() / half)
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.complex(x[..., :half].double(), x[..., half:].double()) * turn


def largest(model: Transformer, batches: list[Text]) -> Tensor:
    """Of keys and of values, fp64 [layers, 2]."""
    found = torch.zeros(model.config.num_layers, 2, dtype=torch.float64)
    positions = torch.empty(0)

    def keep(number: int, part: int, _: object, __: object, output: Tensor) -> None:
        x = output.unflatten(-1, (-1, model.config.head_dim))
        x = rotated(x, positions, model.config.rope_theta) if part == 0 else x
        parts = torch.view_as_real(x) if x.is_complex() else x
        found[number, part] = max(found[number, part], parts.abs().max().double())

    hooks = [
        layer.self_attn.get_submodule(name).register_forward_hook(partial(keep, number, part))
        for number, layer in enumerate(layers_of(model))
        for part, name in enumerate(("k_proj", "v_proj"))
    ]
    for batch in batches:
        positions = batch.positions
        with torch.no_grad():
            model(batch.tokens, positions, PackedAttention(model.config, batch.cu_seqlens))
    for hook in hooks:
        hook.remove()
    return found


def test_they_cover_the_largest_of_the_text() -> None:
    model, batches = tiny_model(), [*texts(70, 50), *texts(90)]
    scales = calibrated_cache_scales(model, batches)
    assert [[len(part) for part in layer] for layer in scales] == [[2, 2]] * 2
    assert all((part == part[0]).all() for layer in scales for part in layer)
    found = torch.stack([torch.stack([part[0] for part in layer]) for layer in scales])
    torch.testing.assert_close(found.double() * 448, largest(model, batches), rtol=1e-5, atol=0)
    fewer = calibrated_cache_scales(model, batches[:1])
    assert all((few <= all_).all() for f, a in zip(fewer, scales, strict=True) for few, all_ in zip(f, a, strict=True))


@pytest.mark.parametrize("part", ["attention", "block"])
def test_a_layer_that_no_token_enters_has_plain_scales(part: str) -> None:
    model, batches = routed_model(part), texts(60, 40)
    entered = calibrated_cache_scales(model, batches)
    set_thresholds(model, (1e9, 1e9))
    empty = calibrated_cache_scales(model, batches)
    ones = [all(bool((x == 1).all()) for x in both) for both in empty]
    assert ones == [False, True, True, False]
    assert all(bool((x > 0).all() and (x < 1).all()) for both in entered for x in both)

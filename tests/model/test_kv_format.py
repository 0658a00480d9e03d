"""Formats of cached keys and values: what they say a token takes is what their pages take."""

import pytest
import torch

from model.config import MixtureOfDepths
from model.cost import visible_list_bytes
from model.kv_format import KV_FORMATS
from tests.tiny import tiny_config


@pytest.mark.parametrize("dtype", KV_FORMATS, ids=str)
def test_pages_take_the_bytes_that_the_format_says(dtype: torch.dtype) -> None:
    """Keys, values and their scales; of a routed layer also who has a key."""
    mixture = MixtureOfDepths("attention", (1,), 0.5, gate_range=0.5)
    config, format = tiny_config(mixture_of_depths=mixture).with_kv_heads([1, 2]), KV_FORMATS[dtype]
    pages = format.allocate(config, 5, 16, torch.device("cpu"))
    assert sum(tensor.nbytes for tensor in pages.tensors()) == 5 * 16 * format.bytes_per_token(config)


@pytest.mark.parametrize("dtype", KV_FORMATS, ids=str)
def test_a_copied_page_is_the_same_in_every_part(dtype: torch.dtype) -> None:
    """Also where pages change places: every source is read before any destination is written."""
    pages = KV_FORMATS[dtype].allocate(tiny_config(), 4, 16, torch.device("cpu"))
    for number, tensor in enumerate(pages.tensors()):
        tensor.copy_(torch.arange(4).view(-1, *[1] * (tensor.ndim - 1)) + number)
    before = [tensor.clone() for tensor in pages.tensors()]
    pages.copy(torch.tensor([0, 1]), torch.tensor([1, 0]))
    for tensor, old in zip(pages.tensors(), before, strict=True):
        assert all(bool((tensor[new] == old[source]).all()) for new, source in enumerate((1, 0, 2, 3)))


@pytest.mark.parametrize(("route", "routed"), [("block", 2), ("mlp", 0)])
def test_lists_of_visible_slots_take_what_is_planned(route: str, routed: int) -> None:
    """A number for each token of each batch row, in the layers whose attention is routed."""
    mixture = MixtureOfDepths(route, (1, 2), 0.5, gate_range=0.5)  # type: ignore[arg-type]
    config = tiny_config(num_layers=4, mixture_of_depths=mixture)
    pages = KV_FORMATS[torch.float32].allocate(config, 5, 16, torch.device("cpu"), num_rows=3, most_tokens=64)
    assert sum(each.lists.nbytes for each in pages.visible.values()) == 4 * routed * 3 * 64
    assert visible_list_bytes(config, rows=3, tokens=64) == 4 * routed * 3 * 64

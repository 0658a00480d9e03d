"""What was trained is what is served: packed attention, paged attention and the fused form give the same logits."""

import pytest
import torch

from model.attention import AttentionOverBatch, PackedAttention, PagedAttention
from model.families import registry
from model.kv_format import KV_FORMATS
from model.transformer import Transformer
from tests.model.paged_cache import PagedCache, RoundedAttention
from tests.tiny import full_logits, tiny_config, tiny_model

LENGTHS = (37, 1, 16, 50)
FAMILIES = sorted(registry.FAMILIES)


def documents(seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 512, (length,), generator=generator).tolist() for length in LENGTHS]


def packed_logits(
    model: Transformer, batch: list[list[int]], attention: AttentionOverBatch | None = None
) -> torch.Tensor:
    tokens = torch.tensor([token for document in batch for token in document])
    positions = torch.cat([torch.arange(len(document)) for document in batch])
    cu_seqlens = torch.tensor([0, *map(len, batch)]).cumsum(0).int()
    with torch.no_grad():
        return model.logits(model(tokens, positions, attention or PackedAttention(model.config, cu_seqlens)))


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.isfinite(actual).all()
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_do_not_see_each_other(family: str) -> None:
    model = tiny_model(family)
    expected = torch.cat([full_logits(model, document) for document in documents()])
    assert_same(packed_logits(model, documents()), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_paged_equals_packed_in_one_step(family: str) -> None:
    model = tiny_model(family)
    cache = PagedCache(model, LENGTHS)
    paged = cache.logits([(sequence, 0, document) for sequence, document in enumerate(documents())])
    assert_same(paged, packed_logits(model, documents()))


@pytest.mark.parametrize("chunk", [1, 7, 16, 33])
@pytest.mark.parametrize("family", FAMILIES)
def test_paged_equals_packed_in_chunks(family: str, chunk: int) -> None:
    """Chunk 1 is decoding token by token; sequences of other lengths run along until they end."""
    model = tiny_model(family)
    cache = PagedCache(model, LENGTHS)
    batch = documents()
    rows: list[list[torch.Tensor]] = [[] for _ in batch]
    for done in range(0, max(LENGTHS), chunk):
        chunks = [(s, done, document[done : done + chunk]) for s, document in enumerate(batch) if done < len(document)]
        logits = cache.logits(chunks).split([len(new) for _, _, new in chunks])
        for (sequence, _, _), part in zip(chunks, logits, strict=True):
            rows[sequence].append(part)
    assert_same(torch.cat([part for parts in rows for part in parts]), packed_logits(model, batch))


def test_prefill_decode_and_verification_share_one_step() -> None:
    """Rows of one batch may be a whole prompt, one token, or a few tokens to verify."""
    model = tiny_model("llama")
    cache = PagedCache(model, LENGTHS)
    batch = documents()
    cache.logits([(0, 0, batch[0][:36]), (3, 0, batch[3][:45])])
    mixed = cache.logits([(3, 45, batch[3][45:]), (2, 0, batch[2]), (0, 36, batch[0][36:])])
    whole = {sequence: full_logits(model, batch[sequence]) for sequence in (0, 2, 3)}
    assert_same(mixed, torch.cat([whole[3][45:], whole[2], whole[0][36:]]))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_pages_of_eight_bits_hold_rounded_keys_and_values(family: str, dtype: torch.dtype) -> None:
    model = tiny_model(family)
    cache = PagedCache(model, LENGTHS, dtype=dtype)
    paged = cache.logits([(sequence, 0, document) for sequence, document in enumerate(documents())])
    assert_same(paged, packed_logits(model, documents(), RoundedAttention(model.config, LENGTHS, dtype)))


@pytest.mark.parametrize("family", FAMILIES)
def test_documents_over_a_cache_of_their_own(family: str) -> None:
    """Without rounding what packed attention gives; with it, what packed attention over rounded keys gives."""
    model = tiny_model(family)
    cu_seqlens = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    for dtype in (torch.float32, torch.int8):
        plain = dtype == model.dtype
        expected = None if plain else RoundedAttention(model.config, LENGTHS, dtype)
        paged = PagedAttention.over_documents(model.config, cu_seqlens, KV_FORMATS[dtype])
        assert_same(packed_logits(model, documents(), paged), packed_logits(model, documents(), expected))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_fusing_keeps_the_logits(family: str, tied: bool) -> None:
    model = tiny_model(family, tie_word_embeddings=tied)
    expected = packed_logits(model, documents())
    fused = model.fuse()
    assert_same(packed_logits(fused, documents()), expected)
    paged = PagedCache(fused, LENGTHS).logits(
        [(sequence, 0, document) for sequence, document in enumerate(documents())]
    )
    assert_same(paged, expected)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("prefix", [1, 2, 11, 12, 13, 29, 36])
def test_the_future_does_not_change_the_past(family: str, prefix: int) -> None:
    model = tiny_model(family)
    first, _, _, other = documents()
    changed = first[:prefix] + other[: len(first) - prefix]
    torch.testing.assert_close(full_logits(model, changed)[:prefix], full_logits(model, first)[:prefix])


def test_activation_checkpointing_keeps_the_gradients() -> None:
    gradients = []
    for checkpointing in (False, True):
        model = tiny_model("qwen3")
        model.activation_checkpointing = checkpointing
        tokens = torch.tensor(documents()[0])
        attention = PackedAttention(model.config, torch.tensor([0, len(tokens)], dtype=torch.int32))
        model.logits(model(tokens, torch.arange(len(tokens)), attention)).square().mean().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    torch.testing.assert_close(gradients[0], gradients[1], atol=0, rtol=0)
    assert all(gradient is not None and gradient.abs().sum() > 0 for gradient in gradients[0].values())


def test_rotary_angles_survive_a_cast_to_bf16() -> None:
    """Rounded angles would be wrong after some hundred positions; only the weights may be rounded."""
    model = tiny_model("llama")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    before = full_logits(model, documents()[3])
    assert torch.equal(full_logits(model.bfloat16().float(), documents()[3]), before)


def test_parameter_counts_match_the_model() -> None:
    for family in FAMILIES:
        for tied in (False, True):
            config = tiny_config(family, tie_word_embeddings=tied)
            counted = sum(parameter.numel() for parameter in Transformer(config).parameters())
            assert config.num_parameters() == counted

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from kernels.attention._rotary_cpu import _library, make_tables
from kernels.attention.rotary import apply_rotary, apply_rotary_reference, rope_frequencies, rotary_tables
from tests.compare import check_all_close, check_close

SCALINGS = {
    "none": None,
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_equals_transformers(scaling: dict | None) -> None:
    config = LlamaConfig(hidden_size=128, num_attention_heads=4, max_position_embeddings=512)
    config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0, **(scaling or {})}
    oracle = LlamaRotaryEmbedding(config)
    positions = torch.tensor([0, 1, 2, 63, 64, 500])
    q, k = torch.randn(6, 4, 32), torch.randn(6, 2, 32)
    actual = apply_rotary(q, k, *rotary_tables(positions, rope_frequencies(32, 10000.0, scaling)))
    heads_first = q.transpose(0, 1)[None], k.transpose(0, 1)[None]
    expected = apply_rotary_pos_emb(*heads_first, *oracle(q, positions[None]))
    check_all_close(actual, tuple(x[0].transpose(0, 1) for x in expected))


@pytest.mark.skipif(_library() is None, reason="no C compiler")
@pytest.mark.parametrize("tokens", [0, 1, 3, 200])
def test_tables_in_c_have_the_bits_of_torch(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a server's last bit differs from a trainer's, rounded activations differ by steps."""
    given = torch.arange(0, 600 * tokens, 600)[:tokens], rope_frequencies(24, 1e4)
    in_c = make_tables(*given)
    monkeypatch.setattr("kernels.attention.rotary.makes_tables", lambda *given: False)
    expected = rotary_tables(*given)
    assert all(torch.equal(one, other) for one, other in zip(in_c, expected, strict=True))


def test_older_configs_name_the_type_otherwise() -> None:
    assert torch.equal(
        rope_frequencies(16, 1e4, {"type": "linear", "factor": 2.0}),
        rope_frequencies(16, 1e4, {"rope_type": "linear", "factor": 2.0}),
    )


def test_unknown_scaling_is_an_error() -> None:
    with pytest.raises(ValueError, match="'yarn' is not supported"):
        rope_frequencies(16, 1e4, {"rope_type": "yarn", "factor": 2.0})


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("differentiable", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 50])
def test_equals_the_reference(dtype: torch.dtype, differentiable: bool, tokens: int) -> None:
    # Slices of one projection, as a fused layer leaves them.
    heads = torch.randn(tokens, 9, 24).to(dtype).requires_grad_(differentiable)
    q, k = heads[:, :5], heads[:, 5:8]
    tables = rotary_tables(torch.arange(tokens) + 1000, rope_frequencies(24, 1e4))
    actual = apply_rotary(q, k, *tables)
    assert [x.dtype for x in actual] == [dtype, dtype]
    wide = tuple(table.double() for table in tables)
    check_all_close(actual, apply_rotary_reference(q.double(), k.double(), *wide))


def test_scores_depend_on_distance_alone() -> None:
    q, k = torch.randn(1, 1, 64), torch.randn(1, 1, 64)
    frequencies = rope_frequencies(64, 1e4)
    scores = []
    for shift in (0, 100, 3000):
        turned_q, _ = apply_rotary(q, k, *rotary_tables(torch.tensor([shift + 7]), frequencies))
        _, turned_k = apply_rotary(q, k, *rotary_tables(torch.tensor([shift]), frequencies))
        scores.append((turned_q * turned_k).sum())
    torch.testing.assert_close(torch.stack(scores), scores[0].expand(3), rtol=1e-3, atol=1e-3)


def test_gradients() -> None:
    q, k = (torch.randn(4, heads, 6, dtype=torch.float64, requires_grad=True) for heads in (3, 1))
    cos, sin = (table.double() for table in rotary_tables(torch.arange(4) + 3, rope_frequencies(6, 1e4)))
    assert torch.autograd.gradcheck(lambda q, k: apply_rotary(q, k, cos, sin), (q, k))


def test_bf16_gradients() -> None:
    q, k = torch.randn(40, 3, 16).bfloat16(), torch.randn(40, 1, 16).bfloat16()
    tables = rotary_tables(torch.arange(40), rope_frequencies(16, 1e4))
    grads = torch.randn_like(q), torch.randn_like(k)
    leaves = q.clone().requires_grad_(), k.clone().requires_grad_()
    actual = torch.autograd.grad(apply_rotary(*leaves, *tables), leaves, grads)
    wide = q.double().requires_grad_(), k.double().requires_grad_()
    outputs = apply_rotary_reference(*wide, *(table.double() for table in tables))
    for one, other in zip(actual, torch.autograd.grad(outputs, wide, tuple(g.double() for g in grads)), strict=True):
        check_close(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("tokens", "q_heads", "kv_heads", "head_dim"), [(0, 2, 1, 8), (1, 5, 3, 24), (9, 4, 4, 16), (2, 10, 9, 256)]
)
def test_kernel_equals_the_reference(
    device: torch.device, dtype: torch.dtype, tokens: int, q_heads: int, kv_heads: int, head_dim: int
) -> None:
    """Slices of one projection, more heads than a program takes, gradients."""
    joint = torch.randn(tokens, q_heads + 2 * kv_heads, head_dim).to(dtype).to(device).requires_grad_()
    q, k = joint[:, :q_heads], joint[:, q_heads : q_heads + kv_heads]
    tables = rotary_tables(torch.arange(tokens, device=device) + 1000, rope_frequencies(head_dim, 1e4).to(device))
    actual = apply_rotary(q, k, *tables)
    assert [x.dtype for x in actual] == [dtype, dtype]
    with torch.no_grad():
        assert all(map(torch.equal, actual, apply_rotary(q, k, *tables)))
    oracle = joint.detach().double().requires_grad_()
    q, k = oracle[:, :q_heads], oracle[:, q_heads : q_heads + kv_heads]
    expected = apply_rotary_reference(q, k, *(table.double() for table in tables))
    check_all_close(actual, expected)
    grads = tuple(torch.randn(x.shape, device=device).to(dtype) for x in actual)
    (grad,) = torch.autograd.grad(actual, (joint,), grads)
    check_close(grad, torch.autograd.grad(expected, (oracle,), tuple(g.double() for g in grads))[0])


def test_kernel_refuses_what_it_cannot_take(device: torch.device) -> None:
    q, k = torch.randn(4, 3, 8, device=device), torch.randn(4, 1, 8, device=device)
    tables = rotary_tables(torch.arange(4, device=device), rope_frequencies(8, 1e4).to(device))
    with pytest.raises(ValueError, match="more than their heads"):
        apply_rotary(q, k.bfloat16(), *tables)
    with pytest.raises(ValueError, match=r"q is torch\.float64"):
        apply_rotary(q.double(), k.double(), *tables)
    with pytest.raises(ValueError, match="as rotary_tables makes them"):
        apply_rotary(q, k, *(table[:, :, :4] for table in tables))
    with pytest.raises(ValueError, match="contiguous in its last dimension"):
        apply_rotary(q.transpose(1, 2), k, *tables)

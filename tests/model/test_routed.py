"""Mixture of depths, exactly: who is computed, who is left alone, and that nobody sees who comes later."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model.attention import PackedAttention
from model.config import ConfigError, MixtureOfDepths, ModelConfig
from model.files.checkpoint import load_config, load_model, save_model
from model.routed import ExpertChoice, RoutedLayer
from model.transformer import Transformer
from tests.compare import relative_rms
from tests.interpreted import interpreted
from tests.model.paged_cache import PagedCache
from tests.tiny import full_logits, tiny_config, tiny_model
from tests.trials import trials

ROUTES = ("attention", "mlp", "block")
LAYERS = (1, 2)
LENGTHS = (37, 1, 16, 50)


def routed_model(route: str = "attention", family: str = "llama", *, seed: int = 0, **changes: Any) -> Transformer:
    """Routers at random, so that about half of the tokens pass."""
    mixture = MixtureOfDepths(route, LAYERS, 0.5, gate_range=0.5)  # type: ignore[arg-type]
    sizes = {"num_layers": 4} | changes
    return tiny_model(family, seed=seed, mixture_of_depths=mixture, **sizes)


def dense_twin(model: Transformer) -> Transformer:
    """The same weights without routers."""
    twin = Transformer(tiny_config(model.config.family, num_layers=4))
    twin.load_state_dict({name: x for name, x in model.state_dict().items() if ".router." not in name})
    return twin.eval()


def documents(seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 512, (length,), generator=generator).tolist() for length in LENGTHS]


def flat(batch: list[list[int]]) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, positions and cu_seqlens."""
    return (
        torch.tensor([token for document in batch for token in document]),
        torch.cat([torch.arange(len(document)) for document in batch]),
        torch.tensor([0, *map(len, batch)]).cumsum(0).int(),
    )


def packed_logits(model: Transformer, batch: list[list[int]], routing: Any = None) -> Tensor:
    tokens, positions, cu_seqlens = flat(batch)
    return model.logits(model(tokens, positions, PackedAttention(model.config, cu_seqlens), routing))


def expert_choice(batch: list[list[int]], capacity: float) -> ExpertChoice:
    tokens, _, cu_seqlens = flat(batch)
    return ExpertChoice(cu_seqlens, len(tokens), capacity)


class Chosen:
    """A rule that says what it was told, whatever the scores."""

    def __init__(self, selected: Tensor) -> None:
        self.selected = selected

    def __call__(self, layer: int, scores: Tensor) -> Tensor:
        return self.selected


# --- what is computed ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("route", ROUTES)
def test_everyone_at_gate_one_is_the_dense_model_bit_for_bit(route: str, dtype: torch.dtype) -> None:
    model = routed_model(route).to(dtype)
    for layer in LAYERS:
        torch.nn.init.zeros_(model.model.layers[layer].router.weight)
    twin = dense_twin(model).to(dtype).requires_grad_(True)
    for learns in (True, False):  # attention has a form for either
        with torch.set_grad_enabled(learns):
            expected = packed_logits(twin, documents())
            assert torch.equal(packed_logits(model, documents(), expert_choice(documents(), 1.0)), expected)


def gates(layer: RoutedLayer, x: Tensor) -> Tensor:
    scores = torch.nn.functional.rms_norm(x, (x.shape[1],), eps=1e-5) @ layer.router.weight[0] + layer.router.bias
    return 1 + 0.5 * torch.tanh(scores)


def plain_layer(layer: RoutedLayer, x: Tensor, chosen: list[int]) -> Tensor:
    """One routed layer on one document, token sets spelled out: the oracle."""
    rows, out = x[chosen], x.clone()
    gate = gates(layer, x)[chosen, None]
    twin = Transformer(tiny_config(num_layers=4))
    attention = PackedAttention(twin.config, torch.tensor([0, len(x)], dtype=torch.int32))
    among_chosen = PackedAttention(twin.config, torch.tensor([0, len(chosen)], dtype=torch.int32))
    rotary = twin.rotary(torch.arange(len(x)))
    attend, think = layer.self_attn, layer.mlp
    before, after = (norm.add for norm in (layer.input_layernorm, layer.post_attention_layernorm))
    if layer.route == "mlp":
        out = x + attend(before(x, None)[0], rotary, attention)
        gate = gates(layer, out)[chosen, None]
    else:
        out[chosen] += gate * attend(before(rows, None)[0], tuple(t[chosen] for t in rotary), among_chosen)
    if layer.route == "attention":
        return out + think(after(out, None)[0])
    result = out.clone()
    result[chosen] += gate * think(after(out[chosen], None)[0])
    return result


@pytest.mark.parametrize("route", ROUTES)
def test_a_layer_computes_what_its_definition_says(route: str) -> None:
    model = routed_model(route)
    layer = model.model.layers[1]
    x = torch.randn(23, 64, generator=torch.Generator().manual_seed(4))
    selected = torch.rand(23, generator=torch.Generator().manual_seed(5)) < 0.4
    attention = PackedAttention(model.config, torch.tensor([0, 23], dtype=torch.int32))
    rotary = model.rotary(torch.arange(23))
    delta, residual = layer(x / 4, 3 * x / 4, rotary=rotary, attention=attention, routing=Chosen(selected))
    actual = delta if residual is None else delta + residual
    expected = plain_layer(layer, x, selected.nonzero()[:, 0].tolist())
    assert relative_rms(actual, expected) < 1e-5
    if route == "block":
        assert torch.equal(actual[~selected], x[~selected])


@pytest.mark.parametrize("grad", [True, False], ids=["training", "inference"])
def test_rows_that_are_not_selected_keep_their_bits(grad: bool) -> None:
    for route in ("attention", "block"):
        layer = routed_model(route).model.layers[1]
        x = torch.randn(40, 64)
        given = x.clone()
        attention = PackedAttention(tiny_config(num_layers=4), torch.tensor([0, 40], dtype=torch.int32))
        selected = torch.arange(40) % 3 == 0
        rotary = routed_model().rotary(torch.arange(40))
        with torch.set_grad_enabled(grad):
            delta, residual = layer(x, None, rotary=rotary, attention=attention, routing=Chosen(selected))
        stream = delta if residual is None else residual
        assert torch.equal(stream[~selected], given[~selected]) and torch.equal(x, given)
        assert (stream[selected] != given[selected]).any(dim=1).all()


@pytest.mark.parametrize("route", ROUTES)
def test_a_layer_that_nobody_enters_does_not_run(route: str) -> None:
    model = routed_model(route)
    calls: list[str] = []
    for part in ("self_attn", "mlp"):
        getattr(model.model.layers[1], part).register_forward_hook(lambda *_, part=part: calls.append(part))
    nobody = Chosen(torch.zeros(sum(LENGTHS), dtype=torch.bool))
    packed_logits(model, documents(), nobody)
    assert calls == {"attention": ["mlp"], "mlp": ["self_attn"], "block": []}[route]


# --- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", ROUTES)
def test_gradients_reach_the_router_through_selected_rows_and_the_auxiliary_loss_alone(route: str) -> None:
    model = routed_model(route)
    router = model.model.layers[LAYERS[-1]].router
    batch = documents()

    def router_gradient(capacity: float, auxiliary: float) -> Tensor:
        model.zero_grad()
        choice = expert_choice(batch, capacity)
        logits = packed_logits(model, batch, choice)
        (logits.square().mean() + auxiliary * choice.auxiliary_loss()).backward()
        return router.weight.grad.clone()

    learned, both = router_gradient(0.5, 0.0), router_gradient(0.5, 1.0)
    assert learned.abs().sum() > 0
    # The auxiliary loss by hand: Σ (sigmoid(r) − target) x / rms(x), a mean over two layers.
    inputs: list[Tensor] = []
    hook = router.register_forward_hook(lambda _, arguments, __: inputs.append(arguments[0].detach()))
    choice = expert_choice(batch, 0.5)
    packed_logits(model, batch, choice)
    hook.remove()
    normed = torch.nn.functional.rms_norm(inputs[0], (64,), eps=1e-5)
    error = torch.sigmoid(normed @ router.weight[0].detach()) - choice.selected[LAYERS[-1]].float()
    assert relative_rms(both - learned, error @ normed / 2) < 1e-4
    # With nobody selected, nothing but the auxiliary loss is left.
    model.zero_grad()
    packed_logits(model, batch, Chosen(torch.zeros(sum(LENGTHS), dtype=torch.bool))).square().mean().backward()
    assert router.weight.grad is None or not router.weight.grad.any()


def test_the_auxiliary_loss_leaves_the_model_alone() -> None:
    model = routed_model()
    choice = expert_choice(documents(), 0.5)
    packed_logits(model, documents(), choice)
    choice.auxiliary_loss().backward()
    reached = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert reached == {f"model.layers.{layer}.router.{part}" for layer in LAYERS for part in ("weight", "bias")}


@pytest.mark.parametrize("route", ROUTES)
def test_checkpointing_keeps_selection_and_gradients(route: str) -> None:
    """Also where recomputation would choose otherwise: the scores change between the two passes."""

    def step(checkpointing: bool) -> tuple[dict[int, Tensor], dict[str, Tensor]]:
        model = routed_model(route)
        model.activation_checkpointing = checkpointing
        choice = expert_choice(documents(), 0.5)
        loss = packed_logits(model, documents(), choice).square().mean() + choice.auxiliary_loss()
        first = dict(choice.selected)
        choice._best = lambda scores: pytest.fail("chosen again")  # type: ignore[method-assign]
        loss.backward()
        return first, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    plain, recomputed = step(False), step(True)
    assert all(torch.equal(plain[0][layer], recomputed[0][layer]) for layer in LAYERS)
    assert plain[1].keys() == recomputed[1].keys()
    for name, gradient in plain[1].items():
        assert torch.equal(gradient, recomputed[1][name]), name


# --- who is selected -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [0.125, 0.5, 1.0])
def test_each_document_gets_its_share_of_its_best(capacity: float) -> None:
    scores = torch.randn(sum(LENGTHS), generator=torch.Generator().manual_seed(1)).round(decimals=1)  # with ties
    choice = ExpertChoice(torch.tensor([0, *LENGTHS]).cumsum(0).int(), len(scores), capacity)
    selected = choice(0, scores).split(LENGTHS)
    for own, chosen, length in zip(scores.split(LENGTHS), selected, LENGTHS, strict=True):
        wanted = -(-int(capacity * length * 8) // 8)
        best = sorted(range(length), key=lambda token: (-float(own[token]), token))[:wanted]
        assert sorted(best) == chosen.nonzero()[:, 0].tolist()


def test_rounding_adds_no_token() -> None:
    assert int(ExpertChoice(torch.tensor([0, 30], dtype=torch.int32), 30, 0.1)(0, torch.randn(30)).sum()) == 3


@pytest.mark.parametrize("rule", ["expert choice", "thresholds"])
@pytest.mark.parametrize("route", ROUTES)
def test_packed_documents_do_not_influence_each_other(route: str, rule: str) -> None:
    model = routed_model(route)
    batch = documents()
    with torch.no_grad():
        together = packed_logits(model, batch, expert_choice(batch, 0.5) if rule == "expert choice" else None)
        alone = [
            packed_logits(model, [one], expert_choice([one], 0.5) if rule == "expert choice" else None) for one in batch
        ]
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("route", ROUTES)
def test_what_follows_never_changes_what_came_before(route: str) -> None:
    model = routed_model(route)
    prefix, one, other = documents()[0], documents(1)[3], documents(2)[2]
    first, second = (full_logits(model, prefix + suffix)[: len(prefix)] for suffix in (one, other))
    torch.testing.assert_close(first, second, atol=1e-4, rtol=1e-4)
    selected = Recorder(model)
    full_logits(model, prefix + one)
    shares = [float(mask.float().mean()) for mask in selected.masks]
    assert len(shares) == 2 and all(0.1 < share < 0.9 for share in shares), "the probe must see a real choice"


PREFIXES = (1, 2, 3, 5, 8, 13, 21)


@pytest.mark.parametrize("seed", range(trials(1, 20)))
@pytest.mark.parametrize("route", ROUTES)
def test_no_prefix_of_any_length_sees_what_follows(route: str, seed: int) -> None:
    """Whatever follows, and when nothing does."""
    model = routed_model(route, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    text, other = torch.randint(0, 512, (2, 30), generator=generator).tolist()
    expected = full_logits(model, text)
    for length in PREFIXES:
        for changed in (text[:length], text[:length] + other[length:]):
            found = full_logits(model, changed)[:length]
            torch.testing.assert_close(found, expected[:length], atol=1e-4, rtol=1e-4)


class Recorder:
    """Keeps what the served rule selected."""

    def __init__(self, model: Transformer) -> None:
        self.masks: list[Tensor] = []
        for layer in LAYERS:
            module = model.model.layers[layer]
            module.router.register_forward_hook(lambda _, __, scores: self.masks.append(scores > 0))


# --- served as trained -----------------------------------------------------------------------------------------------


@pytest.mark.covering
@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_paged_equals_packed_in_chunks(family: str, route: str, chunk: int) -> None:
    """Chunk 1 is decoding token by token. The mistral has a window, which counts the tokens that entered a layer."""
    model, batch = routed_model(route, family), documents()
    with torch.no_grad():
        expected = packed_logits(model, batch)
    assert_same(chunked_logits(PagedCache(model, LENGTHS), batch, chunk), expected)
    assert_same(chunked_logits(PagedCache(model.fuse(), LENGTHS), batch, chunk), expected)


def chunked_logits(cache: PagedCache, batch: list[list[int]], chunk: int) -> Tensor:
    rows: list[list[Tensor]] = [[] for _ in batch]
    for done in range(0, max(map(len, batch)), chunk):
        chunks = [(s, done, document[done : done + chunk]) for s, document in enumerate(batch) if done < len(document)]
        logits = cache.logits(chunks).split([len(new) for _, _, new in chunks])
        for (sequence, _, _), part in zip(chunks, logits, strict=True):
            rows[sequence].append(part)
    return torch.cat([part for parts in rows for part in parts])


def assert_same(actual: Tensor, expected: Tensor) -> None:
    assert torch.isfinite(actual).all()
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("route", ROUTES)
def test_rejected_tokens_leave_no_trace(route: str) -> None:
    """What was verified and rejected is overwritten, and so is whether it had a key."""
    model, document = routed_model(route), documents()[3]
    cache = PagedCache(model, LENGTHS)
    cache.logits([(3, 0, document[:20])])
    cache.logits([(3, 20, [document[20], *documents(7)[0][:9]])])  # nine drafted tokens, none of them right
    again = cache.logits([(3, 21, document[21:])])
    assert_same(again, full_logits(model, document)[21:])


@pytest.mark.parametrize("route", ROUTES)
def test_triton_trains_and_serves_the_same(route: str) -> None:
    """Through the interpreter, with padded places; the CPU's exact counts are the oracle."""
    batch = [document[:21] for document in documents()]
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_query_heads": 2, "num_kv_heads": 1}

    def step(model: Transformer) -> tuple[Tensor, dict[str, Tensor]]:
        choice = expert_choice(batch, 0.5)
        logits = packed_logits(model, batch, choice)
        (logits.square().mean() + choice.auxiliary_loss()).backward()
        return logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    expected, gradients = step(routed_model(route, **sizes))
    with torch.no_grad():
        served = packed_logits(routed_model(route, **sizes), batch)
    with interpreted():
        logits, found = step(routed_model(route, **sizes))
        paged = chunked_logits(PagedCache(routed_model(route, **sizes).fuse(), LENGTHS), batch, 17)
    assert relative_rms(logits, expected) < 2e-5 and relative_rms(paged, served) < 2e-5
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert relative_rms(found[name], gradient) < 2e-5, name


# --- artifacts -------------------------------------------------------------------------------------------------------


def test_a_routed_model_comes_back_as_it_was(tmp_path: Path) -> None:
    model = routed_model("block")
    save_model(model, tmp_path)
    again = load_model(tmp_path)
    assert again.config == model.config
    with torch.no_grad():
        assert torch.equal(packed_logits(again, documents()), packed_logits(model, documents()))


def test_other_tools_refuse_it(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    save_model(routed_model(), tmp_path)
    with pytest.raises(ValueError, match="potstill_mixture_of_depths"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["architectures"] == ["PotstillMixtureOfDepthsForCausalLM"] and raw["mixture_of_depths"]["layers"] == [
        1,
        2,
    ]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"route": "heads"}, "route is 'heads'"),
        ({"layers": [2, 1]}, "ascending"),
        ({"layers": [1, 9]}, "layer 9 of 4"),
        ({"capacity": 0.0}, "capacity"),
        ({"thresholds": [0.0]}, "one finite number"),
        ({"layers": None}, "mixture_of_depths"),
    ],
)
def test_a_damaged_block_is_refused(tmp_path: Path, change: dict, sentence: str) -> None:
    raw = routed_model().config.to_hf()
    raw["mixture_of_depths"] |= change
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=sentence):
        load_config(tmp_path)


def test_without_its_block_it_is_refused() -> None:
    raw = routed_model().config.to_hf()
    del raw["mixture_of_depths"]
    with pytest.raises(ConfigError, match="mixture_of_depths"):
        ModelConfig.from_hf(raw)


def test_dropping_layers_drops_their_routers() -> None:
    config = routed_model().config
    kept = config.keep_layers((0, 2, 3)).mixture_of_depths
    assert kept is not None and kept.layers == (1,) and len(kept.thresholds) == 1
    assert config.keep_layers((0, 3)).mixture_of_depths is None
    assert sum(p.numel() for p in routed_model().parameters()) == config.num_parameters()

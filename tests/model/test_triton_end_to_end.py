"""The Triton kernels through the whole house: trainer, server and speculation compute what the CPU forms compute.

In fp32. On a GPU the kernels run natively, elsewhere through Triton's interpreter: hence the small sizes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model.attention import PackedAttention
from model.config import MixtureOfDepths
from model.files.checkpoint import save_model
from model.transformer import Transformer
from pipeline.measure.parity import check_parity
from serve.config import EngineConfig
from serve.engine.engine import Engine
from serve.engine.loading import Models
from serve.sampling_params import SamplingParams
from tests.compare import relative_rms
from tests.interpreted import interpreted
from tests.model.paged_cache import PagedCache, RoundedAttention
from tests.serve.toys import generate, greedy, random_prompts, toy_tokenizer
from tests.tiny import tiny_model
from train.packing import Batch

# Of the families, mistral has a window, qwen3 norms of the heads, smollm3 layers without rotation.
LENGTHS = (19, 1, 17)
BOUND = 2e-5


@contextmanager
def triton() -> Iterator[torch.device]:
    """Where the kernels run within this context."""
    if torch.cuda.is_available():
        yield torch.device("cuda")
        return
    with interpreted():
        yield torch.device("cpu")


def small_model(family: str = "llama", **changes: Any) -> Transformer:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_query_heads": 2, "num_kv_heads": 1}
    return tiny_model(family, **(sizes | changes))


def documents() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 512, (length,), generator=generator).tolist() for length in LENGTHS]


def train_step(model: Transformer, attention: PackedAttention | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits of the packed documents and every gradient, on the CPU."""
    batch, device = documents(), model.device
    tokens = torch.tensor([token for document in batch for token in document], device=device)
    positions = torch.cat([torch.arange(length, device=device) for length in LENGTHS])
    if attention is None:
        attention = PackedAttention(model.config, torch.tensor([0, *LENGTHS], device=device).cumsum(0).int())
    logits = model.logits(model(tokens, positions, attention))
    torch.log_softmax(logits, dim=-1)[:, 7].sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return logits.detach().cpu(), {name: grad.cpu() for name, grad in gradients.items() if grad is not None}


@pytest.mark.parametrize(
    ("family", "checkpointing"),
    [
        ("llama", False),
        ("mistral", False),
        ("qwen3", False),
        ("qwen3", True),
        ("smollm3", False),
        ("granite", False),
        ("olmo2", False),
        ("phi3", False),
        ("gemma2", False),
        ("gemma3_text", False),
    ],
)
def test_training_equals_the_cpu_form(family: str, checkpointing: bool) -> None:
    expected_logits, expected = train_step(small_model(family))
    with triton() as device:
        model = small_model(family).to(device)
        model.activation_checkpointing = checkpointing
        logits, gradients = train_step(model)
    assert relative_rms(logits, expected_logits) < BOUND
    assert gradients.keys() == expected.keys() == {name for name, _ in model.named_parameters()}
    for name, gradient in gradients.items():
        assert expected[name].abs().sum() > 0 and relative_rms(gradient, expected[name]) < BOUND, name


@pytest.mark.parametrize(
    "family", ["llama", "mistral", "qwen3", "smollm3", "granite", "olmo2", "phi3", "gemma2", "gemma3_text"]
)
def test_serving_equals_training(family: str) -> None:
    """The fused form: prompts in chunks, then token by token, each step a mix of the sequences that are left."""
    expected, _ = train_step(small_model(family))
    rows: list[list[Tensor]] = [[] for _ in LENGTHS]
    with triton() as device:
        cache = PagedCache(small_model(family).to(device).fuse(), LENGTHS)
        for start, stop in ((0, 9), (9, 16), (16, 17), (17, 18), (18, 19)):
            left = [(number, document) for number, document in enumerate(documents()) if start < len(document)]
            chunks = [(number, start, document[start:stop]) for number, document in left]
            logits = cache.logits(chunks).cpu().split([len(new) for _, _, new in chunks])
            for (sequence, _, _), part in zip(chunks, logits, strict=True):
                rows[sequence].append(part)
    assert relative_rms(torch.cat([part for parts in rows for part in parts]), expected) < BOUND


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_pages_of_eight_bits_hold_rounded_keys_and_values(dtype: torch.dtype) -> None:
    with triton() as device:
        model = small_model().to(device)
        expected, _ = train_step(model, RoundedAttention(model.config, LENGTHS, dtype, device.type))
        cache = PagedCache(model, LENGTHS, dtype=dtype)
        logits = cache.logits([(number, 0, document) for number, document in enumerate(documents())])
    assert relative_rms(logits.cpu(), expected) < BOUND


def make_engine(target: Transformer, draft: Transformer | str | None, device: torch.device, **options: Any) -> Engine:
    name, model = (draft, None) if isinstance(draft, str) else (None, draft)
    models = Models(target, toy_tokenizer(), model, device=device)
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 24, "num_pages": 64, "max_model_len": 64}
    return Engine(EngineConfig(model="toy", draft=name, device=device.type, **(sizes | options)), models)


@pytest.mark.parametrize(("draft", "kept"), [(None, "auto"), ("equal", "auto"), ("stranger", "auto"), (None, "int8")])
def test_the_engine_says_what_it_says_on_the_cpu(draft: str | None, kept: str) -> None:
    """Speculation must change nothing, whether all drafts are accepted or none, nor in what pages are kept."""
    prompts, params = random_prompts(3, seed=2, high=24), greedy(4)
    cpu = torch.device("cpu")
    expected = generate(make_engine(small_model("qwen3"), None, cpu, kv_cache_dtype=kept), prompts, params)
    with triton() as device:
        target = small_model("qwen3").to(device).fuse()
        drafts = {"equal": target, "stranger": small_model(seed=8, num_layers=1).to(device)}
        options: dict[str, Any] = {"num_speculative_tokens": 2, "kv_cache_dtype": kept}
        engine = make_engine(target, drafts[draft] if draft else None, device, **options)
        assert generate(engine, prompts, params) == expected
    if draft:
        stats = engine.stats()
        assert stats.num_draft_tokens > 0 and (stats.num_accepted_tokens > 0) == (draft == "equal")


@pytest.mark.parametrize("draft", [None, "stranger", "ngram"])
def test_sampling_says_what_it_says_on_the_cpu(draft: str | None) -> None:
    """Every setting in one batch, on the device's own kernels: the draws are the same, so the tokens are."""
    settings: list[dict[str, Any]] = [
        {"temperature": 0.0, "repetition_penalty": 1.3},
        {"seed": 5, "temperature": 0.8, "top_p": 0.9},
        {"temperature": 1.2, "top_k": 20, "frequency_penalty": 0.4},
        {"seed": 6, "min_p": 0.05, "logit_bias": {7: 2.0}, "min_tokens": 3, "logprobs": 2},
    ]
    params = [SamplingParams(max_tokens=4, ignore_eos=True, **setting) for setting in settings]
    prompts = [prompt * 2 for prompt in random_prompts(4, seed=2, high=12)]

    def answers(device: torch.device) -> list[list[int]]:
        source = small_model(seed=8, num_layers=1).to(device) if draft == "stranger" else draft
        target = small_model("qwen3").to(device).fuse()
        engine = make_engine(target, source, device, num_speculative_tokens=2 if draft else None)
        return generate(engine, prompts, params)

    expected = answers(torch.device("cpu"))
    with triton() as device:
        assert answers(device) == expected


@pytest.mark.parametrize(
    ("route", "draft"),
    [("attention", False), ("mlp", False), ("block", False), ("block", True)],
    ids=["attention", "mlp", "block", "block-drafted"],
)
def test_the_engine_routes_as_on_the_cpu(route: str, draft: bool) -> None:
    """Selected tokens come in padded places here, on the CPU in exactly as many as there are."""
    mixture = MixtureOfDepths(route, (0, 1), 0.5, gate_range=0.5)  # type: ignore[arg-type]
    prompts, params = random_prompts(3, seed=2, high=24), greedy(4)
    routed = [small_model(seed=seed, num_layers=3, mixture_of_depths=mixture) for seed in (0, 1)]
    expected = generate(make_engine(routed[0], None, torch.device("cpu")), prompts, params)
    with triton() as device:
        target, other = (model.to(device).fuse() for model in routed)
        engine = make_engine(target, other if draft else None, device, num_speculative_tokens=2 if draft else None)
        assert generate(engine, prompts, params) == expected


def test_the_parity_gate_passes(tmp_path: Path) -> None:
    save_model(small_model(num_layers=1), tmp_path)
    toy_tokenizer().save(tmp_path)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(2, 512, (2, 30), generator=generator)
    ends = torch.tensor([0, 29], dtype=torch.int32)
    batches = [Batch(row[:-1], torch.arange(29), ends, row[1:], num_labels=29) for row in tokens]
    with triton() as device:
        parity = check_parity(tmp_path, batches, device)
    assert parity.passed and parity.tokens == 2 * 28 and parity.same_top == 1

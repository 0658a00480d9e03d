"""Drafts on the benchmark's shapes: verification of chains and trees, look-up in the text; ours, and who does the same.

Legend: B sequences, n drafted tokens, V vocabulary, S tokens of a text.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from bench import kernel_sampling_peers as peers
from bench.kernel_cases import Candidate, Case, Outputs, Run
from bench.kernel_sampling import BATCHES, VOCABULARY, on_host, random_logits, random_stream
from kernels.sampling.ngram import MAX_NGRAM, find_ngrams, find_ngrams_reference
from kernels.sampling.random import Purpose, Stream, exponential, uniform
from kernels.sampling.verification import VerifyOutput, verify, verify_reference

CHAIN, TREE = 4, 8
DRAFT_NOISE = 0.5
"""Standard deviation of the draft's logits around the target's: it is right often, and wrong often."""
TEXT, LETTERS, DRAFTED = 8192, 20, 5
"""Tokens of a text, of how many kinds: about half of the texts repeat their last three."""


def sampling_drafts(tiny: bool) -> list[Case]:
    """Verification of drafted chains and trees against the target's distributions; drafts from the text itself."""
    if tiny:
        return [
            _verification_case(2, CHAIN, 300, tree=False),
            _verification_case(2, TREE, 300, tree=True),
            _ngram_case(2, 100),
        ]
    return [
        *(_verification_case(batch, CHAIN, VOCABULARY, tree=False) for batch in BATCHES),
        *(_verification_case(batch, TREE, VOCABULARY, tree=True) for batch in (1, 16, 64)),
        *(_ngram_case(batch, TEXT) for batch in BATCHES),
    ]


@dataclass
class VerificationInputs:
    """target_p [B, n + 1, V] and draft_p [B, n, V] fp32; tokens [B, n]; parents [B, n], None for chains."""

    target_p: Tensor
    draft_p: Tensor
    tokens: Tensor
    parents: Tensor | None
    counts: Tensor
    lengths: Tensor
    stream: Stream

    @classmethod
    def random(
        cls, batch: int, nodes: int, vocabulary: int, device: torch.device, *, tree: bool
    ) -> "VerificationInputs":
        logits = random_logits(batch * (nodes + 1), vocabulary, device).float().unflatten(0, (batch, -1))
        target_p = logits.softmax(dim=-1)
        draft_p = (logits[:, :-1] + DRAFT_NOISE * torch.randn_like(logits[:, :-1])).softmax(dim=-1)
        parents = torch.arange(nodes, device=device)
        # In a tree every node has two children, drawn from the same distribution.
        parents = parents // 2 if tree else parents
        drawn = draft_p[:, parents] / torch.empty(batch, nodes, vocabulary, device=device).exponential_()
        return cls(
            target_p,
            draft_p,
            drawn.argmax(dim=-1),
            parents.expand(batch, -1).contiguous() if tree else None,
            torch.full((batch,), nodes, dtype=torch.int32, device=device),
            torch.randint(100, 1000, (batch,), dtype=torch.int32, device=device),
            random_stream(batch, device),
        )


def verified_reference(inputs: VerificationInputs) -> Outputs:
    """The five results, one sequence after the other in fp64; then what a commitment is checked against."""
    (batch, nodes), vocabulary = inputs.tokens.shape, inputs.target_p.shape[2]
    stream = on_host(inputs.stream)
    u, draws = uniform(stream, nodes, Purpose.ACCEPT), exponential(stream, vocabulary, Purpose.RESIDUAL)
    parents = [list(range(nodes))] * batch if inputs.parents is None else inputs.parents.tolist()
    found = []
    for row, tokens in enumerate(inputs.tokens.tolist()):
        distributions = (x[row].cpu().numpy() for x in (inputs.target_p, inputs.draft_p))
        noise = {"u": u[row].numpy(), "exponential": draws[row].numpy()}
        path, next_token = verify_reference(*distributions, tokens, parents[row], **noise)
        committed = [tokens[node - 1] for node in path] + [next_token]
        padding = [-1] * (nodes + 1 - len(committed))
        length = int(inputs.lengths[row]) + len(committed)
        found.append((len(path), next_token, committed + padding, [*path, -1, *padding], length))
    verdicts = (torch.tensor(column, device=inputs.tokens.device) for column in zip(*found, strict=True))
    return *verdicts, inputs.target_p, inputs.draft_p, inputs.tokens


def _verification_case(batch: int, nodes: int, vocabulary: int, *, tree: bool) -> Case:
    if tree:
        others = [Candidate("torch", peers.torch_tree, compare=_compare_output, reads_on_host=True)]
    else:
        others = [
            Candidate("flashinfer", peers.flashinfer_chain, compare=_is_possible),
            Candidate("torch", peers.torch_chain, compare=_is_possible),
        ]
    return Case(
        name=f"{'tree' if tree else 'chain'} of {nodes} x{batch}",
        shape={"tree": tree, "nodes": nodes, "batch": batch, "vocabulary": vocabulary},
        flops=0.0,
        num_bytes=8 * batch * vocabulary,  # p and q of one node
        make_inputs=partial(VerificationInputs.random, batch, nodes, vocabulary, tree=tree),
        reference=verified_reference,
        candidates=[Candidate("potstill", _our_output, role="ours", compare=_compare_output), *others],
        dtype=torch.float32,
    )


def _our_output(inputs: VerificationInputs) -> Run:
    given = {"counts": inputs.counts, "lengths": inputs.lengths, "parents": inputs.parents}
    return lambda: tuple(verify(inputs.target_p, inputs.draft_p, inputs.tokens, stream=inputs.stream, **given))


def _compare_output(outputs: Outputs, expected: Outputs) -> tuple[Outputs, Outputs]:
    return outputs, expected[: len(VerifyOutput._fields)]


def _is_possible(outputs: Outputs, expected: Outputs) -> tuple[Outputs, Outputs]:
    """Whether each row of committed tokens is a beginning of its draft, a token that may follow it, and −1."""
    (committed,), (target_p, draft_p, tokens) = outputs, expected[-3:]
    rows, nodes = torch.arange(len(tokens), device=tokens.device), tokens.shape[1]
    accepted = (committed[:, :nodes] == tokens).cumprod(dim=1).sum(dim=1)
    left = target_p[rows, accepted]
    rejected = draft_p[rows, accepted.clamp(max=nodes - 1)]
    left = torch.where((accepted < nodes)[:, None], left - rejected, left)
    following = committed.gather(1, accepted[:, None]).long()
    chosen = following.clamp(0, target_p.shape[2] - 1)
    places = torch.arange(nodes + 1, device=tokens.device)
    ends = ((committed == -1) | (places <= accepted[:, None])).all(dim=1)
    possible = ends & (chosen == following)[:, 0] & (left.gather(1, chosen)[:, 0] > 0)
    return (possible,), (torch.ones_like(possible),)


@dataclass
class NgramInputs:
    """tokens [B, S] int64, of which `lengths` [B] are there."""

    tokens: Tensor
    lengths: Tensor

    @classmethod
    def random(cls, batch: int, longest: int, device: torch.device) -> "NgramInputs":
        lengths = torch.randint(longest // 2, longest + 1, (batch,), dtype=torch.int32, device=device)
        return cls(torch.randint(0, LETTERS, (batch, longest), device=device), lengths)


def ngrams_reference(inputs: NgramInputs) -> tuple[Tensor, Tensor]:
    """Drafts [B, k] with −1 behind them, counts [B]."""
    texts = zip(inputs.tokens.tolist(), inputs.lengths.tolist(), strict=True)
    drafts = [find_ngrams_reference(text[:length], DRAFTED) for text, length in texts]
    padded = [draft + [-1] * (DRAFTED - len(draft)) for draft in drafts]
    device = inputs.tokens.device
    return torch.tensor(padded, device=device), torch.tensor([len(draft) for draft in drafts], device=device)


def _ngram_case(batch: int, longest: int) -> Case:
    def ours(inputs: NgramInputs) -> Run:
        return lambda: find_ngrams(inputs.tokens, inputs.lengths, DRAFTED)

    return Case(
        name=f"n-gram in {longest} x{batch}",
        shape={"tokens": longest, "batch": batch},
        flops=0.0,
        num_bytes=8 * batch * longest * 0.75,  # texts of half of the tokens to all
        make_inputs=partial(NgramInputs.random, batch, longest),
        reference=ngrams_reference,
        candidates=[
            Candidate("potstill", ours, role="ours"),
            Candidate("torch", partial(peers.torch_ngrams, k=DRAFTED, max_ngram=MAX_NGRAM)),
        ],
    )

"""AdamW over a model's trained parameters, its learning rate, and its state under the parameters' full names.

    adamw               torch's fused AdamW: two fp32 moments, 8 bytes a parameter
    adamw_8bit          moments in 8 bits and an absmax for each 256 of them, 2.03 bytes; small tensors keep fp32
    paged_adamw         the first one's moments in pinned host memory: none on the GPU
    paged_adamw_8bit    both

Frozen parameters have no gradient and no state, and are not in a checkpoint.

Learning rates are pure functions of the step, so that a resumed run needs no schedule state. Every schedule warms up
linearly, then multiplies the peak by a factor between the floor and 1:

    constant    1 until the end
    cosine      half a cosine from 1 to the floor
    wsd         warm-up, stable, decay: 1, then 1 - (1 - floor) √progress over the last `decay_fraction` of the steps
                (the decay shape of arXiv 2405.18392)
"""

import hashlib
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from kernels.adamw_8bit import BLOCK, Moments, adamw_8bit
from model.quantized import quantized_tensors
from model.training_memory import PAGED_PIECE, SMALLEST_IN_8_BITS, SMALLEST_PAGED
from model.unmade import when_made
from train.config import TrainingConfig
from train.offload import PinnedArena, Prefetcher, State
from train.parallel import Trained
from train.saved_tensors import SavedTensors, place_of, whole_shape

log = logging.getLogger(__name__)

MOMENTS = ("exp_avg", "exp_avg_sq")
EPS = 1e-8


def make_optimizer(model: Trained, config: TrainingConfig) -> torch.optim.Optimizer:
    """The optimizer that `config.optimizer` names. Norms and biases are not decayed; LoRA's B has its own rate.

    Each group's `rate` is what its learning rate is multiplied by.
    """
    groups = list(_groups(model, config))
    betas = (config.beta1, config.beta2)
    eight_bit, paged = config.optimizer.endswith("8bit"), config.optimizer.startswith("paged")
    on_gpu = next(parameter.is_cuda for group in groups for parameter in group["params"])
    if paged and not on_gpu:
        adamw = config.optimizer.removeprefix("paged_")
        log.info("Without a GPU %s is %s: moments are in host memory anyway.", config.optimizer, adamw)
    if not eight_bit and not (paged and on_gpu):
        return torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, eps=EPS, fused=True)
    return AdamW(groups, lr=config.learning_rate, betas=betas, eight_bit=eight_bit, paged=paged and on_gpu)


def _groups(model: Trained, config: TrainingConfig) -> Iterator[dict[str, Any]]:
    """Parameters that are decayed and trained alike."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    for is_up in (False, True):
        for is_matrix in (True, False):
            found = [p for name, p in named if _is_lora_up(name) == is_up and (p.dim() > 1) == is_matrix]
            decay = config.weight_decay if is_matrix else 0.0
            if found:
                yield {"params": found, "weight_decay": decay, "rate": config.learning_rate_ratio if is_up else 1.0}


def _is_lora_up(name: str) -> bool:
    """Whether it is an adapter's B, the matrix that begins at zero."""
    return name.endswith(".lora.b")


def learning_rate_factor(step: int, total_steps: int, config: TrainingConfig) -> float:
    """Returns what to multiply the peak learning rate by at `step` (0 is the first), in (0, 1]."""
    schedule, floor = config.schedule, config.min_learning_rate_fraction
    warmup_steps = round(total_steps * config.warmup_fraction)
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule == "constant":
        return 1.0
    decay_steps = total_steps - warmup_steps if schedule == "cosine" else round(total_steps * config.decay_fraction)
    # The step after the last one would stand exactly on the floor.
    progress = (step - (total_steps - decay_steps)) / max(decay_steps, 1)
    if progress <= 0:
        return 1.0
    if schedule == "cosine":
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    return 1 - (1 - floor) * math.sqrt(min(progress, 1.0))


class Part(NamedTuple):
    """A parameter or a piece of one, with its gradient, its state and the settings of its group."""

    parameter: Tensor
    grad: Tensor
    state: State
    group: dict[str, Any]


class AdamW(torch.optim.Optimizer):
    """AdamW whose moments are in 8 bits, or in host memory, or both; see kernels/adamw_8bit.py and train/offload.py."""

    def __init__(
        self, groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float], eight_bit: bool, paged: bool
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": 0.0, "rate": 1.0})
        self.eight_bit, self.updates = eight_bit, 0
        self.paged: dict[Tensor, State] = {}
        """Moments in host memory, by parameter; they are the parameter's state from its first update on."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        large = [parameter for parameter in parameters if parameter.numel() >= SMALLEST_PAGED]
        if paged and large:
            self._page(large)

    def _page(self, large: list[Tensor]) -> None:
        self.arena = PinnedArena([self._empty(parameter, torch.device("meta")) for parameter in large])
        self.paged = dict(zip(large, self.arena.states, strict=True))
        largest = max(large, key=Tensor.numel).view(-1)[:PAGED_PIECE]
        self.prefetcher = Prefetcher(self._empty(largest, torch.device("meta")), largest.device)

    def _empty(self, parameter: Tensor, device: torch.device) -> State:
        """A state with undefined content."""
        if self.eight_bit and full_numel(parameter) >= SMALLEST_IN_8_BITS:
            return Moments.empty(parameter.numel(), device=device)._asdict()
        return {kind: torch.empty(parameter.shape, dtype=parameter.dtype, device=device) for kind in MOMENTS}

    def new_moments(self, parameter: Tensor) -> State:
        """The state of a parameter before its first update; those in host memory are set back."""
        state = self.paged.get(parameter) or self._empty(parameter, parameter.device)
        if "exp_avg_absmax" in state:
            Moments(**state).reset()
            return state
        for tensor in state.values():
            tensor.zero_()
        return state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # the loss is never evaluated again
        """Updates every parameter that has a gradient."""
        self.updates += 1
        pieces: list[Part] = []
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if parameter not in self.state:
                    self.state[parameter] = self.new_moments(parameter)
                whole = Part(parameter, parameter.grad, self.state[parameter], group)
                if parameter in self.paged:
                    pieces += _pieces(*whole)
                else:
                    self._update(whole)
        if pieces:
            states = self.prefetcher.prefetched([piece.state for piece in pieces])
            for piece, state in zip(pieces, states, strict=True):
                self._update(piece._replace(state=state))

    def _update(self, part: Part) -> None:
        parameter, grad, state, group = part
        if not parameter.numel():  # a shard without a row
            return
        beta1, beta2 = group["betas"]
        common = {"beta1": beta1, "beta2": beta2, "eps": EPS, "weight_decay": group["weight_decay"]}
        if "exp_avg_absmax" in state:
            adamw_8bit(parameter, grad, Moments(**state), learning_rate=group["lr"], step=self.updates, **common)
            return
        steps = torch.full((), self.updates - 1.0, device=parameter.device)  # torch counts up before it updates
        adamw(
            [parameter], [grad], [state["exp_avg"]], [state["exp_avg_sq"]], [], [steps],
            lr=group["lr"], amsgrad=False, maximize=False, fused=True, **common,
        )  # fmt: skip


def full_numel(parameter: Tensor) -> int:
    """Elements of the whole, of which this may be a part (train/sharding.py)."""
    return math.prod(whole_shape(parameter))


def _pieces(parameter: Tensor, grad: Tensor, state: State, group: dict[str, Any]) -> Iterator[Part]:
    """A contiguous parameter in pieces of `PAGED_PIECE` elements: AdamW takes each by itself, or each block of 256."""
    block = BLOCK if "exp_avg_absmax" in state else 1
    rows = state if block > 1 else {kind: tensor.view(-1) for kind, tensor in state.items()}
    weights, grads = parameter.view(-1), grad.reshape(-1)
    for start in range(0, len(weights), PAGED_PIECE):
        stop = min(start + PAGED_PIECE, len(weights))
        part = slice(start // block, -(-stop // block))
        yield Part(weights[start:stop], grads[start:stop], {kind: tensor[part] for kind, tensor in rows.items()}, group)


# --- states by name ---------------------------------------------------------------------------------------------------


def named_weights(model: Trained) -> dict[str, Tensor]:
    """Trained parameters by name, tied ones once."""
    return {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}


def named_moments(model: Trained, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """`exp_avg.NAME`, `exp_avg_sq.NAME` and so on of every trained parameter; none before the first update."""
    moments = {}
    for name, parameter in model.named_parameters():
        for kind, tensor in optimizer.state[parameter].items() if parameter in optimizer.state else ():
            if kind != "step":
                moments[f"{kind}.{name}"] = tensor
    return moments


class FrozenDigest:
    """Identity of what a checkpoint leaves out: each frozen tensor's name, shape, dtype and 1,024 of its elements.

    Codes and scales of quantized weights are among them.
    """

    def __init__(self, model: nn.Module) -> None:
        """Of a model that may get its weights later."""
        self._order = {name: number for number, (name, _) in enumerate(model.named_modules())}
        self._taken: list[tuple[int, int, bytes]] = []
        when_made(model, self._take)

    def _take(self, part: nn.Module, prefix: str) -> None:
        frozen = [(name, one) for name, one in part.named_parameters(prefix) if not one.requires_grad]
        for kind, named in enumerate((frozen, part.named_buffers(prefix), quantized_tensors(part, prefix))):
            for name, tensor in named:
                place = self._order[name.rpartition(".")[0]]
                self._taken.append((kind, place, _sample(name, tensor.detach())))

    def hexdigest(self) -> str:
        """Once it has them all."""
        ordered = sorted(self._taken, key=lambda taken: taken[:2])
        return hashlib.sha256(b"".join(sample for *_, sample in ordered)).hexdigest()


def _sample(name: str, tensor: Tensor) -> bytes:
    elements = tensor.reshape(-1)[:: max(1, tensor.numel() // 1_024)].contiguous().cpu()
    return f"{name} {tuple(tensor.shape)} {tensor.dtype} ".encode() + elements.view(torch.uint8).numpy().tobytes()


def prepare_moments(model: Trained, optimizer: torch.optim.Optimizer, updates: int) -> None:
    """Gives the optimizer the state that it has after `updates` updates, with empty moments to be copied over."""
    if isinstance(optimizer, AdamW):
        optimizer.updates = updates
    for parameter in model.parameters() if updates else ():
        if not parameter.requires_grad:
            continue
        if isinstance(optimizer, AdamW):
            optimizer.state[parameter] = optimizer.new_moments(parameter)
        else:
            step = torch.tensor(float(updates), device=parameter.device)
            optimizer.state[parameter] = {"step": step, **{kind: torch.zeros_like(parameter) for kind in MOMENTS}}


@torch.no_grad()
def restore(model: Trained, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Copies a checkpoint's weights and moments over one's own, as far as this process holds them.

    Raises TrainingStateError unless names and shapes are the same.
    """
    own, states = named_weights(model), named_moments(model, optimizer)
    places = {name: place_of(parameter) for name, parameter in model.named_parameters()}
    shapes = {name: whole_shape(parameter) for name, parameter in model.named_parameters() if name in own}
    with SavedTensors(folder, "model") as weights, SavedTensors(folder, "optimizer") as moments:
        weights.check(shapes)
        in_8_bits = {name for name in own if f"exp_avg_absmax.{name}" in states}
        parameters = {key: key.split(".", 1)[1] for key in states}
        moments.check({key: () if name in in_8_bits else shapes[name] for key, name in parameters.items()})
        for name, tensor in own.items():
            tensor.copy_(weights.read(name, places[name]))
        for key, name in parameters.items():
            if name not in in_8_bits:
                states[key].copy_(moments.read(key, places[name]))
        for name in in_8_bits:
            files = [place for _, place in weights.parts(name)]
            held = Moments(*(states[f"{kind}.{name}"] for kind in Moments._fields))
            moments.moments(name, held, places[name], shapes[name], files)

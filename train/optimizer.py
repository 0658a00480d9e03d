"""AdamW over a model's parameters, and its state under the parameters' full names."""

from pathlib import Path

import torch
from torch import Tensor, nn

from train.checkpoint import TrainingStateError
from train.config import TrainingConfig

MOMENTS = ("exp_avg", "exp_avg_sq")


def make_optimizer(model: nn.Module, config: TrainingConfig) -> torch.optim.AdamW:
    """Fused: one pass over weights and moments. Norms and biases are not decayed."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in parameters if parameter.dim() > 1]
    vectors = [parameter for parameter in parameters if parameter.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), fused=True)


def named_weights(model: nn.Module) -> dict[str, Tensor]:
    """Parameters by name, tied ones once."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def named_moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """`exp_avg.NAME` and `exp_avg_sq.NAME` of every trained parameter; none before the first update."""
    moments = {}
    for name, parameter in model.named_parameters():
        for kind in MOMENTS if parameter in optimizer.state else ():
            moments[f"{kind}.{name}"] = optimizer.state[parameter][kind]
    return moments


def prepare_moments(model: nn.Module, optimizer: torch.optim.Optimizer, updates: int) -> None:
    """Gives the optimizer the state that it has after `updates` updates, with moments of zero to be copied over."""
    for parameter in model.parameters() if updates else ():
        if parameter.requires_grad:
            step = torch.tensor(float(updates), device=parameter.device)
            optimizer.state[parameter] = {"step": step, **{kind: torch.zeros_like(parameter) for kind in MOMENTS}}


@torch.no_grad()
def copy_into(own: dict[str, Tensor], saved: dict[str, Tensor], folder: Path) -> None:
    """Copies saved tensors over one's own; raises TrainingStateError unless names and shapes are the same."""
    if own.keys() != saved.keys():
        odd = sorted(own.keys() ^ saved.keys())[0]
        place = "there" if odd in saved else "here"
        raise TrainingStateError(f"{folder} is of another model: {odd} is only {place}.")
    for name, tensor in own.items():
        found, needed = tuple(saved[name].shape), tuple(tensor.shape)
        if found != needed:
            raise TrainingStateError(f"{folder} is of another model: {name} is {found} instead of {needed}.")
        tensor.copy_(saved[name])

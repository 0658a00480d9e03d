"""Our side of `bench.train.gkd`: see `bench.train.gkd.trl`, whose counterpart it is."""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from bench.cost import cost_of
from bench.train.sides import Case, Recorder, train_ours
from model.files.checkpoint import load_model, save_model
from train.config import TrainingConfig
from train.objectives import Distillation


def main() -> None:
    told: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(told["threads"])
    scratch, steps = Path(told["scratch"]), told["steps"]
    case = Case(scratch, len(told["sequences"][0]) - 1, len(told["sequences"]) // steps, steps, warm_up=0)
    teacher, student = (load_model(scratch / name, dtype=torch.float32) for name in ("teacher", "student"))
    named = ("learning_rate", "beta1", "beta2", "max_grad_norm", "seed")
    config = TrainingConfig(
        **case.budget, **{name: told[name] for name in named}, schedule="constant", warmup_fraction=0, precision="fp32"
    )
    recorder = Recorder()
    cost = cost_of(lambda: train_ours(student, Distillation(teacher), case, config, recorder))
    save_model(student, Path(told["out"]), dtype=torch.float32)
    print(json.dumps(cost | {"losses": recorder.losses}))


if __name__ == "__main__":
    main()

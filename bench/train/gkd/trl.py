"""TRL's side of `bench.train.gkd`, run by the interpreter that has it; so it imports `bench.cost` alone of ours.

    PYTHON -m bench.train.gkd.trl CASE.json

The case names the folder of the models, the sequences in their order, steps, optimizer, threads, and the folder `out`
that is written; the last line printed is what training cost. Settings that it does not name are their defaults.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.experimental.gkd import GKDConfig, GKDTrainer

from bench.cost import cost_of


class InOrder(GKDTrainer):  # type: ignore[misc]
    """Takes the sequences as they come."""

    def _get_train_sampler(self, *given: Any) -> torch.utils.data.Sampler[int]:
        return torch.utils.data.SequentialSampler(self.train_dataset)


def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    ids = torch.tensor([row["input_ids"] for row in rows])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def main() -> None:
    told: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(told["threads"])
    teacher, student = (
        AutoModelForCausalLM.from_pretrained(f"{told['scratch']}/{name}", dtype=torch.float32)
        for name in ("teacher", "student")
    )
    config = GKDConfig(
        output_dir=f"{told['out']}-trainer", lmbda=0.0, beta=0.0, temperature=1.0, max_steps=told["steps"],
        per_device_train_batch_size=len(told["sequences"]) // told["steps"], learning_rate=told["learning_rate"],
        lr_scheduler_type="constant", adam_beta1=told["beta1"], adam_beta2=told["beta2"], weight_decay=0.0,
        max_grad_norm=told["max_grad_norm"], seed=told["seed"], bf16=False, use_cpu=True,
        gradient_checkpointing=False, logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip
    trainer = InOrder(
        student,
        teacher,
        config,
        data_collator=collate,
        train_dataset=Dataset.from_list([{"input_ids": sequence} for sequence in told["sequences"]]),
        processing_class=AutoTokenizer.from_pretrained(f"{told['scratch']}/student"),
    )
    cost = cost_of(trainer.train)
    student.save_pretrained(told["out"])
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    versions = {name: version(name) for name in ("trl", "transformers", "torch")}
    print(json.dumps(cost | {"losses": losses, "versions": versions}))


if __name__ == "__main__":
    main()

"""What every benchmark shares: the teacher, the machine it ran on, and how a result is kept."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from kernels.common.processor import processor_features
from kernels.linear.cpu_form import cpu_form
from model.mesh import choose_dtype
from pipeline.environment import package_versions, processor_name
from pipeline.files import write_atomically

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
TEACHER = ROOT / "runs" / "teacher" / "00-teacher" / "model"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = choose_dtype("auto", torch.device(DEVICE))
"""In which every side multiplies: bf16 where that is fast."""


def teacher_folder() -> Path:
    """SmolLM2-135M-Instruct as an artifact; imported from its wheel on first use."""
    if not (TEACHER / "potstill.json").exists():
        subprocess.run([sys.executable, "-m", "pipeline", "run", "configs/teacher.yaml"], cwd=ROOT, check=True)
    return TEACHER


def check_peer(interpreter: str, package: str, install: str) -> None:
    """Ends with a sentence where an interpreter does not have a peer's package."""
    if subprocess.run([interpreter, "-c", f"import {package}"], capture_output=True).returncode:
        raise SystemExit(f"{interpreter} has no {package}; {install}, then name --peer ENVIRONMENT/bin/python.")


def run_side(interpreter: str, module: str, case: dict[str, Any]) -> dict[str, Any]:
    """What a side's module prints last, run by its interpreter on a case that names `threads` and a path `out`."""
    path = Path(f"{case['out']}.json")
    path.write_text(json.dumps(case))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(case["threads"])}
    command = [interpreter, "-m", module, str(path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{module} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def gpu_name() -> str | None:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def machine() -> dict[str, Any]:
    """Hardware and versions, for the record beside every figure."""
    names = ("torch", "triton", "transformers", "accelerate", "peft", "bitsandbytes")
    return {
        "cpu": processor_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "bf16_instructions": [flag for flag in ("amx_bf16", "avx512_bf16") if flag in processor_features()],
        "gpu": gpu_name(),
        "python": platform.python_version(),
        "packages": dict.fromkeys(names) | package_versions(names),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def write_result(name: str, command: str, result: dict[str, Any]) -> Path:
    """Keeps a result as `bench/results/NAME.json`, and says so."""
    path = RESULTS / f"{name}.json"
    write_json(path, {"command": command, "machine": machine(), **result})
    print(f"written to {path.relative_to(ROOT)}")
    return path


def write_result_by_processor(name: str, command: str, result: dict[str, Any]) -> Path:
    """The same, beside what was measured on processors with other instructions, which stays."""
    path = RESULTS / f"{name}.json"
    kept = json.loads(path.read_text())["by_processor"] if path.exists() else {}
    write_json(path, {"command": command, "by_processor": kept | {cpu_form(): {"machine": machine(), **result}}})
    print(f"written to {path.relative_to(ROOT)}")
    return path


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(content, indent=2) + "\n").encode())


def gpu_peak_bytes(run: Callable[[], object]) -> int:
    """The most that all tensors on the GPU take at one moment of a call."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    run()
    return torch.cuda.max_memory_allocated()

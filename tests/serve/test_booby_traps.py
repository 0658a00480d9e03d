"""Promise S21: nothing in a model's folder is run, whatever it is called and whoever would look for it.

What Python itself says of reading pickles, starting processes and running code is listened to while booby-trapped
folders are opened; `tests/test_house.py` reads that no source could do so.
"""

import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from model.files.adapter import save_adapter
from model.files.checkpoint import load_model
from model.lora import LoraConfig, attach_lora
from tests.serve.http_server import ROOT, save_tiny_folder
from tests.trials import trials

TRAP = "open({marker!r}, 'w').close()"
OPENS_A_FOLDER = """
import json, pickle, sys
from pathlib import Path
from model.files.adapter import load_adapter
from model.files.checkpoint import load_model
from model.text.tokenizer import Tokenizer

FORBIDDEN = {"pickle.find_class", "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "socket.connect"}
(root,) = sys.argv[1:]
seen = []

def heard(event, args):
    code = getattr(args[0], "co_filename", "") if event == "exec" else args[1] if event == "import" else ""
    if event in FORBIDDEN or root in str(code or ""):
        seen.append(event)

def open_all(folder):
    load_model(folder)
    tokenizer = Tokenizer.load(folder)
    tokenizer.chat_token_ids([{"role": "user", "content": "hi"}], add_generation_prompt=True)
    load_adapter(load_model(Path(root) / "good"), folder / "adapter")

open_all(Path(root) / "good")
sys.addaudithook(heard)
refused = []
for folder in sorted(Path(root).glob("trap-*")):
    try:
        open_all(folder)
    except ValueError as error:
        refused.append(folder.name)
found = {"seen": list(seen), "refused": refused, "ran": (Path(root) / "it ran").exists()}
pickle.loads((Path(root) / "pickled.bin").read_bytes())
print(json.dumps(found | {"heard": seen, "does run": (Path(root) / "it ran").exists()}))
"""


class Trap:
    """A pickle that writes a file when it is read."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.marker), "w")


def set_traps(folder: Path, home: Path, marker: Path) -> int:
    """Copies of a good folder, each with something that would run; returns how many."""
    code, pickled = TRAP.format(marker=str(marker)), pickle.dumps(Trap(marker))
    attack = "{{ cycler.__init__.__globals__.os.system('touch " + str(marker) + "') }}"
    python = ["modeling_trap.py", "tokenization_trap.py", "configuration_trap.py", "__init__.py", "conftest.py"]
    python += ["sitecustomize.py", "json.py", "torch.py", "custom_generate/generate.py", "adapter/__init__.py"]
    pickles = ["pytorch_model.bin", "training_args.bin", "optimizer.pt", "rng_state.pth", "scaler.pt", "tokenizer.pkl"]
    pickles += ["adapter/adapter_model.bin", "model.ckpt", "pytorch_model.bin.index.json"]
    automatic = {
        "auto_map": {"AutoModelForCausalLM": "modeling_trap.Trap", "AutoTokenizer": ["tokenization_trap.Trap"]}
    }
    configured = {
        "config.json": [automatic, {"trust_remote_code": True} | automatic, {"architectures": ["modeling_trap.Trap"]}],
        "tokenizer_config.json": [
            automatic, {"tokenizer_class": "tokenization_trap.Trap"}, {"chat_template": attack},
            {"chat_template": attack.replace("cycler", "namespace")}, {"chat_template": "{% include 'json.py' %}"},
        ],
        "generation_config.json": [{"custom_generate": "custom_generate", "trust_remote_code": True}],
        "adapter/adapter_config.json": [{"auto_mapping": {"parent_library": "os"}}, {"modules_to_save": ["os.system"]}],
    }  # fmt: skip
    traps: list[tuple[str, bytes | dict[str, Any]]] = [(name, code.encode()) for name in python]
    traps += [(name, pickled) for name in pickles]
    traps += [(name, change) for name, changes in configured.items() for change in changes]
    for number, (name, what) in enumerate(traps):
        copy = home / f"trap-{number:02}"
        shutil.copytree(folder, copy)
        (copy / name).parent.mkdir(exist_ok=True)
        if isinstance(what, dict):
            known = json.loads((copy / name).read_text()) if (copy / name).exists() else {}
            (copy / "modeling_trap.py").write_text(code)
            what = json.dumps(known | what).encode()
        (copy / name).write_bytes(what)
        if number % 2 and name.endswith((".bin", ".ckpt")):  # in place of what is safe
            (copy / name).with_suffix(".safetensors").unlink(missing_ok=True)
    return len(traps)


@pytest.mark.slow
@pytest.mark.parametrize("options", [["-O"], *([[]] * trials(0, 1))], ids=str)
def test_no_folder_runs_code(tmp_path: Path, options: list[str]) -> None:
    """Nothing is unpickled, started or run while 30 booby-trapped folders are opened; without assertions too."""
    good, marker = tmp_path / "good", tmp_path / "it ran"
    model = load_model(save_tiny_folder(good))
    attach_lora(model, LoraConfig(rank=2, alpha=2))
    save_adapter(model, good / "adapter", LoraConfig(rank=2, alpha=2))
    assert set_traps(good, tmp_path, marker) == 30
    (tmp_path / "pickled.bin").write_bytes(pickle.dumps(Trap(marker)))

    command = [sys.executable, *options, "-c", OPENS_A_FOLDER, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["seen"] == [] and not found["ran"]
    assert 3 <= len(found["refused"]) < 30
    assert found["heard"] == ["pickle.find_class"] and found["does run"], "or nothing would ever be heard"

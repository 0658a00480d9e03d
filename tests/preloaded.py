"""What a process has imported from which others are forked (tests/forked.py): all that training and serving need.

Without the collector of cycles, which would walk over all of it again and again, and once more in every fork.
"""

import gc
from importlib import import_module

MODULES = (
    "torch._dynamo",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "pipeline.run",
    "serve.__main__",
    "serve.http.server",
    "serve.engine.engine",
    "serve.engine.warm_up",
    "tests.train.toy_process",
    "tests.forked_command",
    "tests.serve.scripted_server",
)

gc.disable()
for module in MODULES:
    import_module(module)
gc.freeze()
gc.enable()

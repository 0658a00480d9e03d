"""What a command does before anything else that needs torch."""

import atexit
import gc
import sys


def import_torch() -> None:
    """Import torch without Python's collector of cycles, which then never walks over it, not at the end either.

    It walks over hundreds of thousands of objects again and again as they are made, and once more when Python ends, to
    find nothing: a third of what a short command asks of the processor.
    """
    if "torch" in sys.modules:
        return
    gc.disable()
    import torch  # noqa: F401

    gc.freeze()
    gc.enable()
    atexit.register(gc.freeze)

"""A first hour on a GPU, unattended: is it right, how fast beside its peers, how far from what the machine can do.

    python -m bench.gpu                          # every part, the most worth first; goes on where it stopped
    python -m bench.gpu --parts tests,decode     # some of them; a name also means all that begin with it and a dash
    python -m bench.gpu --again --parts peaks    # measured anew
    python -m bench.gpu --minutes 9              # stops in time; what is left is measured when it is started again
    python -m bench.gpu --tiny                   # a GPU or none: all parts on tiny models and shapes, in a new folder

Each part (parts.py) runs in a process of its own and is killed at its limit: a crash, a hang or an error of CUDA ends
that part alone, and is written down with the last lines of what it said. After each part bench/results/gpu-DEVICE.json
is complete: every part with its figures, the commit and what else decides them, and the table that is printed at the
end, the worst ratio to its goal first. A part that is done is skipped as long as the sources that it measures, the GPU,
torch and Triton are the same. Logs and what a running part has found so far lie in bench/results/gpu/. The exit code is
1 when a part failed, and 2 when there is nothing to run on.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.gpu.hour import Hour, ask_machine
from bench.gpu.parts import PARTS, parts_named
from bench.parts import UnknownPart, asked_for

NO_GPU = (
    "There is no NVIDIA GPU here, so there is nothing to measure; "
    "`python -m bench.gpu --tiny` goes through every part on tiny models and shapes."
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", help="names, separated by commas (default: all)")
    parser.add_argument("--again", action="store_true", help="measure again what is done already")
    parser.add_argument("--minutes", type=float, default=60.0, help="no part runs longer than until then")
    parser.add_argument("--tiny", action="store_true", help="tiny models and shapes: does everything run?")
    parser.add_argument("--out", type=Path, help="where results go (default: bench/results; --tiny: a new folder)")
    options = parser.parse_args(arguments)
    try:
        names = asked_for(options.parts, PARTS, parts_named)
    except UnknownPart as reason:
        print(reason, file=sys.stderr)
        return 2
    machine = ask_machine()
    if machine["gpu"] is None and not options.tiny:
        print(NO_GPU, file=sys.stderr)
        return 2
    hour = Hour(folder_of(options.out, tiny=options.tiny), machine, tiny=options.tiny, minutes=options.minutes)
    return hour.run([PARTS[name] for name in names], again=options.again)


def folder_of(out: Path | None, *, tiny: bool) -> Path:
    if out is not None:
        return out.resolve()
    from bench.common import RESULTS

    return Path(tempfile.mkdtemp(prefix="bench-gpu-")) if tiny else RESULTS


if __name__ == "__main__":
    sys.exit(main())

"""What the compilers make of every hot kernel, counted from machine code for an A100, an RTX 4090 and an H100.

    python -m bench.machine_code        # writes bench/results/machine-code.json; some minutes, no GPU needed
    python -m bench.machine_code 90 --only paged

Each kernel is compiled as it would be on that GPU and disassembled. For a round of its inner loop (all of it, where it
has none): for how many cycles it keeps issue slots, integer, floating point, special and shared memory pipes busy,
beside those in which tensor cores or memory do what they must at the rates of data sheets (pipes.py, cases.py). What is
above 1.0 bounds the kernel, even if everything overlaps; what is below says that it need not, not that it does not.
Goals that a kernel misses stand at the end of its line, and the exit code is 1.

    busiest   its cycles, and which pipe; × of the cycles of memory or tensor cores
    loads     how many loads from global memory in the loop move how many bits a thread; "tiles": by TMA
    waits     how many copies (c) and asynchronous products (p) a wait leaves on their way, one after another
    softmax   how many exponentials of the loop run beside asynchronous products
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from bench.common import write_result
from bench.machine_code.cases import CASES
from bench.machine_code.measure import Measured, measure_cases
from bench.machine_code.pipes import GPUS
from bench.machine_code.program import TOOLS

HEADER = (
    f"{'':44} {'busiest':>15} {'bound':>15} {'×':>5} {'regs':>4} {'spilled':>7} {'KiB':>4} {'at once':>7}  "
    "tensor cores, loads, waits, softmax"
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gpus", nargs="*", type=int, choices=[[], *GPUS], help="ten times the compute capability")
    parser.add_argument("--only", help="cases whose names contain this; nothing is written then")
    options = parser.parse_args(arguments)
    names = [case.name for case in CASES if (options.only or "") in case.name]
    began = time.monotonic()

    def measured_on(capability: int) -> list[Measured]:
        found = []
        for number, one in enumerate(measure_cases(capability, names), 1):
            found.append(one)
            print(f"{time.monotonic() - began:4.0f} s  {GPUS[capability].name} {number}: {one.case}", file=sys.stderr)
        return found

    gpus = options.gpus or list(GPUS)
    with ThreadPoolExecutor(2) as threads:
        results = dict(zip(gpus, threads.map(measured_on, gpus), strict=True))
    for capability, found in results.items():
        print(f"\n{GPUS[capability].name} (sm_{capability})\n{HEADER}")
        print("\n".join(map(row, found)))
    if not options.only and not options.gpus:
        report = {str(capability): [one.as_json() for one in found] for capability, found in results.items()}
        rates = {str(capability): vars(gpu) for capability, gpu in GPUS.items()}
        command = "python -m bench.machine_code"
        write_result("machine-code", command, {"ptxas": assembler(), "gpus": rates, "kernels": report})
    return 1 if any(one.misses() for found in results.values() for one in found) else 0


def assembler() -> str:
    done = subprocess.run([TOOLS / "ptxas", "--version"], capture_output=True, text=True, check=True)
    return done.stdout.split("release ")[1].split(",")[1].split()[0]


def row(one: Measured) -> str:
    bound = f"{one.cycles[one.bound]:.0f} {one.bound}" if one.bound else ""
    ratio = f"{one.ratio:.2f}" if one.ratio is not None else ""
    kib = one.shared_bytes / 1024
    figures = (
        f"{one.case:44} {f'{one.cycles[one.busiest]:.0f} {one.busiest}':>15} {bound:>15} {ratio:>5} "
        f"{one.registers:4} {one.spill_bytes:7} {kib:4.0f} {one.residents:7}"
    )
    loads = " + ".join(f"{count} × {bits}" for bits, count in one.load_bits.items())
    left = [f"{name[0]} {' '.join(map(str, counts))}" for name, counts in one.waits.items() if counts]
    beside, exponentials = one.exponentials
    words = [*one.tensor, loads, *left]
    words += [f"{beside} of {exponentials}"] if exponentials and any("GMMA" in name for name in one.tensor) else []
    words += ["products serialized"] * one.serializes_products
    words += [f"MISSES: {text}" for text in one.misses()]
    return f"{figures}  " + "; ".join(word for word in words if word)


if __name__ == "__main__":
    sys.exit(main())

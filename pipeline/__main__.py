"""`python -m pipeline` is `potstill`: what accelerate and torchrun start."""

import sys

from pipeline.cli import main

if __name__ == "__main__":
    sys.exit(main())

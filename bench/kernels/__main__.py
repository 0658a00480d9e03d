"""`python -m bench.kernels`."""

import sys

from bench.kernels.driver import main

sys.exit(main())

"""``python -m dblast``."""

import os

# Read when torch is loaded, and inherited by workers and notebooks' kernels: idle threads sleep instead of spinning.
# Beside another process on one of two cores, spinning ones make small products twenty times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from dblast.reproduction.cli import main  # noqa: E402

main()

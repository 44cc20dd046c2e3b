"""``python -m dblast``."""

from dblast.cli import main

main()

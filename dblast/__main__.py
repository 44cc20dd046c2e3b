"""``python -m dblast``."""

from dblast.reproduction.cli import main

main()

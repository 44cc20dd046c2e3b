"""The one family of errors that dblast raises for bad input.

Each message is a single line that says what is wrong and what to do about it;
the command line prints it and exits with status 2.
"""


class DBlastError(ValueError):
    """Bad input or a damaged artefact; the message says what to do."""


class ArtefactError(DBlastError):
    """A stored artefact is missing, incomplete or not what its record says."""

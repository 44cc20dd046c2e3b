"""The one family of errors that dblast raises for bad input.

Each message is a single line that says what is wrong and what to do about it;
the command line prints it and exits with status 2.
"""

import errno

#: What an operating system says when it cannot write, and what that means.
_STORAGE = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "it is read-only",
    errno.EACCES: "there is no permission to write it",
    errno.EPERM: "there is no permission to write it",
    errno.ENOTDIR: "a part of its path is a file",
    errno.EEXIST: "a file of that name is in the way",
    errno.EIO: "the disk reports an error",
    errno.ENAMETOOLONG: "its path is too long",
}


class DBlastError(ValueError):
    """Bad input or a damaged artefact; the message says what to do."""


class ArtefactError(DBlastError):
    """A stored artefact is missing, incomplete or not what its record says."""


def storage_reason(error: BaseException) -> str | None:
    """Why something could not be written, if that is what an exception is about."""
    if isinstance(error, OSError) and error.errno in _STORAGE:
        return _STORAGE[error.errno]
    # Libraries in other languages say it in words only.
    return _STORAGE[errno.ENOSPC] if "No space left on device" in str(error) else None

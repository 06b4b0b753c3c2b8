"""Why the federation refuses something: stable codes, and a sentence that says what to do."""

from __future__ import annotations

from fednl_runtime.errors import FednlError


class Refusal(FednlError):
    """A request of a device or an operator that is not granted; `code` is one of the stable codes of the protocol."""

    def __init__(self, code: str, message: str, current_version: int | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.current_version = current_version
        """The version to fetch, where that is what helps."""


class PolicyError(FednlError):
    """A setting of a population that cannot hold, or that would promise what it cannot keep."""


class RoundError(FednlError):
    """A round that cannot be closed by its rule."""


class SigningKeyError(FednlError):
    """A key file or a public key that cannot be used."""


class BlobError(FednlError):
    """Kept bytes that are missing or harmed."""


class DatabaseError(FednlError):
    """A database that cannot be opened or holds something else."""


class SyncError(FednlError):
    """A device that cannot take part: not enrolled, enrolled elsewhere, or a setting that cannot be."""

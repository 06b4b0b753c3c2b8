"""The errors a user or a file can cause; each sentence says what to do."""


class FednlError(Exception):
    """Base class: the message is shown to the user as it is."""


class ConfigError(FednlError):
    """A model configuration that cannot be built."""


class ModelFileError(FednlError):
    """A model file that is not one of ours, is damaged, or needs a newer runtime."""


class CheckpointError(FednlError):
    """A training checkpoint that is missing, damaged or of another configuration."""


class RulesError(FednlError):
    """A set of learning rules that is damaged or made for another model, or a model without a gradient graph."""


class StateError(FednlError):
    """A memory state whose names, shapes or types do not fit the model."""


class RequestError(FednlError):
    """A request with a value that cannot be served."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class SessionNotFoundError(FednlError):
    """No session of that name exists for this caller."""


class SessionBusyError(FednlError):
    """Another turn is writing to the session."""


class SessionExistsError(FednlError):
    """A session of that name is there already."""


class SnapshotNotFoundError(FednlError):
    """The session keeps no such version."""


class VersionConflictError(FednlError):
    """The session is not at the version that the caller counted on."""


class RetryMismatchError(FednlError):
    """An idempotency key was used before with another request."""


class AnswerGoneError(FednlError):
    """A turn was committed under this key, but its answer is not kept: it was too long, or went with its version."""


class StoreError(FednlError):
    """The folder that keeps the sessions cannot be used: full, locked, damaged or not allowed."""


class SessionLimitError(FednlError):
    """No further session fits into the memory set aside for sessions."""


class QueueFullError(FednlError):
    """More turns wait than the server accepts."""


class ShuttingDownError(FednlError):
    """The engine takes no more turns, or rolled one back because it stops."""


class CancelledTurnError(FednlError):
    """The turn was cancelled by its caller and rolled back."""


class MemoryBreachError(FednlError):
    """A turn left a memory that is not finite or too large; the turn was discarded."""


class VerificationError(FednlError):
    """Two implementations of the model disagree by more than the stated bound."""

"""The one tree of errors.

Every error that a user can cause carries a sentence that names the remedy, and an exit code for the
command line. Nothing here knows HTTP; the server maps these classes to status codes.
"""


class SsdError(Exception):
    """Root of all errors of the project. `exit_code` is what the command line returns for it."""

    exit_code = 1


class UserError(SsdError):
    """A wrong input of the user; the message names the remedy."""

    exit_code = 2


class SettingsError(UserError):
    """A setting, flag or variable is unknown or has an impossible value."""


class PortInUseError(UserError):
    """The HTTP port is taken by another process."""

    exit_code = 3


class PermissionProblemError(UserError):
    """A folder or file cannot be read or written."""

    exit_code = 4


class MemoryShortError(UserError):
    """Weights and caches would not fit; found before anything is loaded."""

    exit_code = 5


class CheckpointError(UserError):
    """A model folder is missing, half downloaded, damaged or of an unsupported architecture."""

    exit_code = 6


class HubError(UserError):
    """A download from the model hub was refused or failed (401, 403, no network, no disk)."""

    exit_code = 7


class PairMismatchError(UserError):
    """Draft and target cannot work together (tokenizer, protocol or noise scheme differ)."""

    exit_code = 8


class NoGpuError(UserError):
    """There is a GPU that torch cannot use, and the user has not chosen cores explicitly."""

    exit_code = 9


class RequestError(SsdError):
    """A request is impossible. `field` names the offending request field, or is empty."""

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field


class GrammarError(RequestError):
    """A grammar, or a schema, that an output should match cannot be compiled or followed."""


class ContextLengthError(RequestError):
    """Prompt and output are longer than the model's context."""


class OverloadedError(SsdError):
    """The queue is full; the client may try again after `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineDeadError(SsdError):
    """The verifier process is gone; nothing can be generated until it is restarted."""

    exit_code = 70


class RankLostError(EngineDeadError):
    """Another rank of the target has died, or has not come in time: this one can do nothing without it."""


class DeviceHangError(EngineDeadError):
    """A GPU does not come to the end of what it was given."""

    exit_code = 72


class DeviceMemoryError(EngineDeadError):
    """A GPU's memory ran out in the middle of its work, and smaller work did not help."""


class CaptureError(SsdError):
    """Work of a GPU that cannot be recorded. Nothing of it has run."""


class ProtocolError(SsdError):
    """A peer process sent a message that does not fit the protocol."""

    exit_code = 71


def in_a_line(error: Exception) -> str:
    """Kind and first line of a foreign error."""
    return f"{type(error).__name__}: {(str(error).splitlines() or ['no message'])[0]}"

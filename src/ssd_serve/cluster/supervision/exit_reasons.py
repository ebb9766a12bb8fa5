"""The end of a worker process in words, and as the error that its server ends with. Knows exit codes."""

import signal

from ssd_serve.base.errors import DeviceHangError, EngineDeadError, ProtocolError
from ssd_serve.cluster.supervision.restart_policy import USER_ERRORS

_TELLING = (*USER_ERRORS, EngineDeadError.exit_code, ProtocolError.exit_code, DeviceHangError.exit_code)


class WorkerDiedError(EngineDeadError):
    """A process that nothing works without has ended. `exit_code` is the worker's where it tells a reason."""

    def __init__(self, name: str, code: int, how: str = "") -> None:
        super().__init__(f"the {name} process {how or describe_exit(code)}")
        self.worker_code = code
        self.exit_code = code if code in _TELLING else EngineDeadError.exit_code

    @property
    def explained(self) -> bool:
        """The worker itself has said why on stderr."""
        return self.worker_code in USER_ERRORS


def describe_exit(code: int) -> str:
    """`was killed by SIGKILL`, `ended with code 6`."""
    if code >= 0:
        return f"ended with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = " (the system may be out of memory)" if -code == signal.SIGKILL else ""
    return f"was killed by {name}{hint}"

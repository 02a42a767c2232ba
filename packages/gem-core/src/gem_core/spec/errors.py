"""Errors a user can act on: what was asked, what is so, what to do.

Each class carries the exit code of the ``gem`` command: 1 the run failed, 2 the request is wrong, 3 this machine cannot do it.
"""


class GemError(Exception):
    """Base of all errors that the command line prints without a traceback.

    Args:
        asked: what the user asked for.
        so: what is the case instead.
        do: the next step that repairs it.
    """

    exit_code = 1

    def __init__(self, asked: str, so: str, do: str) -> None:
        super().__init__(asked, so, do)
        self.asked, self.so, self.do = asked, so, do

    def __str__(self) -> str:
        return f"{self.asked}: {self.so}. {self.do}"


class RunFailed(GemError):
    """The run started and could not go on (a NaN loss, a lost rank)."""

    exit_code = 1


class RequestError(GemError):
    """The request is wrong: an unknown key, a label outside {0, 1}, a plugin that does not exist."""

    exit_code = 2


class PluginError(RequestError):
    """A plugin that was asked for cannot be loaded, or two plugins claim one name."""


class KernelUnavailable(RequestError):
    """A backend asked for by name does not fit the request, or no backend does."""


class MachineError(GemError):
    """This machine lacks something: a GPU, an extra, a matching pair of wheels."""

    exit_code = 3

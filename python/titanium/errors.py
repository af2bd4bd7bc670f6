"""The engine's failures as exceptions; each says what is lost (the kinds of titanium/base/error.h)."""


class TitaniumError(RuntimeError):
    """Any failure of the engine."""


class BadConfig(TitaniumError, ValueError):
    """Refused before work started; the engine lives on."""


class BadData(TitaniumError, ValueError):
    """A batch or a data file was refused; the engine lives on."""


class BadCheckpoint(TitaniumError):
    """A weight or checkpoint file cannot be used; nothing is half-loaded."""


class RankLost(TitaniumError):
    """A process is gone; resume from the last complete checkpoint."""


class Bug(TitaniumError):
    """An invariant of the engine is broken; it has ended and saved nothing."""


class ServerDied(RankLost):
    """The server ended while it was needed."""

    def __init__(self, message, returncode=None, stderr_tail=()):
        super().__init__(message)
        self.returncode = returncode  # as subprocess has it: -9 for SIGKILL; None where it cannot be known
        self.stderr_tail = list(stderr_tail)


_KINDS = {cls.__name__: cls for cls in (BadConfig, BadData, BadCheckpoint, RankLost, Bug)}


def from_kind(kind, message):
    """The exception of a kind that came over the wire."""
    return _KINDS.get(kind, TitaniumError)(message)

"""Starting a server, listening to what it says, and telling how it ended."""

import collections
import os
import queue
import signal
import socket
import struct
import subprocess
import sys
import threading

from .errors import BadConfig

_TAIL = 40  # lines of stderr that an error can show


def find_binary(binary=None):
    """The `titanium` command: given, $TITANIUM_BINARY, on PATH, or in the build folder of a source tree."""
    source = "binary"
    if binary is None:
        source, binary = "$TITANIUM_BINARY", os.environ.get("TITANIUM_BINARY") or None
    if binary is not None:
        binary = os.fspath(binary)
        if not os.access(binary, os.X_OK) or os.path.isdir(binary):
            raise BadConfig(f"{source} is {binary!r}, which is not a program: it must be the `titanium` command")
        return binary
    folders = os.environ.get("PATH", "").split(os.pathsep)
    tree = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    for folder in [*folders, os.path.join(tree, "build")]:
        path = os.path.join(folder, "titanium")
        if folder and os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    raise BadConfig("the `titanium` command is not on PATH; give binary= or set TITANIUM_BINARY")


def rank_environment(rank, world_size, local_rank, local_world_size, master_addr, master_port):
    """What tells a server which of several it is; None where nothing is given."""
    given = {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": local_world_size,
        "MASTER_PORT": master_port,
    }
    for name, value in given.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise BadConfig(f"spawn: {name.lower()} is {value!r}; allowed: an integer")
    if rank is None and world_size is None:
        named = [name.lower() for name, value in {**given, "MASTER_ADDR": master_addr}.items() if value is not None]
        if named:
            raise BadConfig(f"spawn: {named[0]} without rank and world_size")
        return None
    if rank is None or world_size is None or (local_rank is None) != (local_world_size is None):
        raise BadConfig("spawn: rank goes with world_size, and local_rank with local_world_size")
    if world_size > 1 and master_port is None:
        raise BadConfig("spawn: several ranks need a master_port, which no other engine uses")
    # Nothing of the caller's own launcher: not its hosts, nor its store.
    environment = {name: "" if value is None else str(value) for name, value in given.items()}
    environment["MASTER_ADDR"] = master_addr or ""
    environment["TORCHELASTIC_USE_AGENT_STORE"] = environment["TORCHELASTIC_RESTART_COUNT"] = ""
    if local_world_size is not None and local_world_size > 1 and not os.environ.get("OMP_NUM_THREADS"):
        environment["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // local_world_size))
    return environment


def open_pidfd(pid):
    """A descriptor that becomes readable when the process ends; None where there is none."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def peer_pidfd(sock):
    """The same for the process at the other end of a Unix socket."""
    if sock.family != socket.AF_UNIX:
        return None
    pid, _, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return open_pidfd(pid) if pid > 0 else None


def describe_status(returncode):
    if returncode is None:
        return "is gone"
    if returncode < 0:
        try:
            name = signal.Signals(-returncode).name
        except ValueError:
            name = f"signal {-returncode}"
        hint = "; the system does that to who takes too much memory" if name == "SIGKILL" else ""
        return f"was ended by {name}{hint}"
    return f"ended with status {returncode}"


class ServerProcess:
    """A `titanium serve` of our own at the other end of a socketpair."""

    def __init__(self, binary, args, env, log):
        if not isinstance(args, (list, tuple)) or not all(isinstance(arg, str) for arg in args):
            raise BadConfig(f"args: {args!r} is not a list of texts")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        command = [binary, "serve", "--fd", str(theirs.fileno()), *args]
        self.socket, self.tail = ours, collections.deque(maxlen=_TAIL)
        started = queue.SimpleQueue()
        # The kernel tells a server of the end of the *thread* that started it, so that is one that lives as long as the
        # server does: the one that reads what it says.  It knows nothing of this object, so that it keeps nothing alive.
        self._reader = threading.Thread(
            target=_run, args=(command, theirs, env, log, self.tail, started), name="titanium-server", daemon=True
        )
        self._reader.start()
        self.process = started.get()
        theirs.close()
        if isinstance(self.process, Exception):
            ours.close()
            raise BadConfig(f"{binary} cannot be started: {self.process}") from self.process
        self.pid = self.process.pid

    def wait(self, seconds):
        """The exit status and the last lines; a process that does not end in time is killed."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.join(2)  # a child of the server's could hold the pipe open
        return self.process.returncode, list(self.tail)


def _has_descriptor(stream):
    try:
        stream.fileno()
        return True
    except (AttributeError, OSError, ValueError):
        return False


def _run(command, theirs, env, log, tail, started):
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno() if _has_descriptor(sys.stderr) else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=[theirs.fileno()],
            env=None if env is None else {**os.environ, **env},
        )
    except Exception as error:  # an environment that is none, too: who waits must hear of it
        started.put(error)
        return
    started.put(process)
    with process.stderr as pipe:
        for line in pipe:
            text = line.decode(errors="replace").rstrip("\n")
            tail.append(text)
            try:
                if log is None:
                    print(text, file=sys.stderr, flush=True)
                elif callable(log):
                    log(text)
                else:
                    log.write(text + "\n")
            except Exception:  # a log that is closed must not stop the server, which would wait for a full pipe
                pass

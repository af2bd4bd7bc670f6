"""Messages of `titanium serve` as bytes and as sockets (docs/serve.md)."""

import fcntl
import json
import math
import mmap
import os
import select
import socket
import struct

from .arrays import DTYPES, Raw
from .errors import BadConfig, BadData

MAGIC = b"titanium"
VERSION = 1
FRAME = struct.Struct("<8sIIQ")
MAX_BLOB = 1 << 36
INLINE = 1 << 20  # a larger blob goes into a memfd, where the socket can pass one
_MAX_DEPTH = 30  # of arguments: the server reads 32 levels
_MAX_ERROR = 1 << 16  # characters of an error's text
_PIECES = 512  # buffers of one system call
_MADV_POPULATE_READ = 22
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE


class ConnectionLost(Exception):
    """The other side closed or died."""


class Message:
    """type: "method", "reply" or "error"; name: the method, or the kind of an error."""

    __slots__ = ("type", "id", "name", "body", "text", "tensors")

    def __init__(self, type, name, id, body=None, tensors=None, text=""):
        self.type, self.name, self.id, self.text = type, name, id, text
        self.body = {} if body is None else body
        self.tensors = {} if tensors is None else tensors  # name -> Raw


def json_number(value):
    """JSON has no infinities: a float that is not finite crosses as "nan", "inf" or "-inf"; float() takes them back."""
    value = float(value)
    return value if math.isfinite(value) else str(value)


def plain(value, what, depth=0):
    """A value as JSON has it: numpy's numbers and paths are taken too.  BadConfig names what cannot be sent."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        if not -(1 << 63) <= value < 1 << 64:
            raise BadConfig(f"{what} is an integer of more than 64 bits")
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise BadConfig(f"{what} is {value}; allowed: finite numbers")
        return float(value)
    if depth == _MAX_DEPTH:
        raise BadConfig(f"{what}: nested deeper than {_MAX_DEPTH} levels")
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise BadConfig(f"{what} has the key {key!r}; allowed: strings")
        return {key: plain(entry, f"{what}.{key}", depth + 1) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry, f"{what}[{i}]", depth + 1) for i, entry in enumerate(value)]
    if isinstance(value, os.PathLike):
        return plain(os.fspath(value), what, depth + 1)
    if callable(getattr(value, "item", None)) and getattr(value, "shape", None) == ():  # a number of numpy or torch
        return plain(value.item(), what, depth + 1)
    raise BadConfig(f"{what} is a {type(value).__name__}; allowed: numbers, texts, lists and dicts of them")


def encode(message):
    """The header of the blob and the buffers that follow it.  BadConfig: something in it cannot be sent."""
    metadata = {"id": str(message.id), message.type: message.name}
    if message.type == "error":
        text = message.text
        if len(text) > _MAX_ERROR:
            text = f"{text[:_MAX_ERROR]} ... ({len(text)} characters)"
        metadata["message"] = text.encode(errors="replace").decode()
    else:
        body = plain(message.body, message.name)
        metadata["args" if message.type == "method" else "result"] = json.dumps(body, ensure_ascii=False)
    header, buffers, at = {"__metadata__": metadata}, [], 0
    # Wide dtypes first, so that every tensor is aligned.
    for name, raw in sorted(message.tensors.items(), key=lambda item: -DTYPES[item[1].dtype][0]):
        header[name] = {"dtype": raw.dtype, "shape": list(raw.shape), "data_offsets": [at, at + raw.nbytes]}
        buffers.append(raw.data)
        at += raw.nbytes
    try:
        text = json.dumps(header, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair: a path of undecodable bytes, say
        part = error.object[max(error.start - 40, 0) : error.end + 20]
        raise BadConfig(f"{message.name}: {part!a} holds text that is not valid Unicode") from None
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, buffers, at


def decode(data):
    """A message from a writable buffer; its tensors are views of it."""
    view = memoryview(data)
    if len(view) < 8:
        raise BadData(f"message: {len(view)} bytes are too few")
    (size,) = struct.unpack_from("<Q", view)
    if size > len(view) - 8:
        raise BadData(f"message: a header of {size} bytes does not fit {len(view)}")
    try:
        header = json.loads(bytes(view[8 : 8 + size]))
        metadata = header.pop("__metadata__")
        type = next(key for key in ("method", "reply", "error") if key in metadata)
        message = Message(type, metadata[type], int(metadata["id"]))
        if type == "error":
            message.text = metadata["message"]
        else:
            message.body = json.loads(metadata["args" if type == "method" else "result"])
        payload = view[8 + size :]
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            raw = Raw(entry["dtype"], entry["shape"], payload[begin:end])
            if not 0 <= begin <= end <= len(payload) or raw.nbytes != end - begin:
                raise ValueError(f"tensor {name!r} does not fit its bytes")
            message.tensors[name] = raw
    except (ValueError, KeyError, TypeError, AttributeError, StopIteration, RecursionError) as error:
        raise BadData(f"message: cannot be understood: {error!r}") from error
    return message


def _write_all(write, buffers):
    pieces = [memoryview(b).cast("B") for b in buffers if len(b)]
    at = 0
    while at < len(pieces):
        done = write(pieces[at : at + _PIECES])
        while done:
            step = min(done, len(pieces[at]))
            pieces[at] = pieces[at][step:]
            done -= step
            if not pieces[at]:
                at += 1


def _sealed(buffers):
    """The buffers end to end in a memfd that can change no more: nothing with a name, so nothing stays after a kill.
    None where the system has no memfds."""
    try:
        fd = os.memfd_create("titanium", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError:
        return None
    try:
        _write_all(lambda pieces: os.writev(fd, pieces), buffers)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


class Channel:
    """One end of a connected stream socket.  pidfd: of the server's process, to notice its death in any case."""

    def __init__(self, sock, pidfd=None):
        self.socket, self.pidfd = sock, pidfd
        self.is_unix = sock.family == socket.AF_UNIX
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        if pidfd is not None:
            self._poll.register(pidfd, select.POLLIN)

    def send(self, message):
        head, buffers, size = encode(message)
        size += len(head)
        if size > MAX_BLOB:
            raise BadData(f"message: {size} bytes, allowed are {MAX_BLOB}")
        memfd = _sealed([head, *buffers]) if self.is_unix and size > INLINE else None
        fds = [] if memfd is None else [memfd]
        if fds:
            head, buffers = b"", []
        frame = FRAME.pack(MAGIC, VERSION, len(fds), size)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", fds[0]))] if fds else []

        def write(pieces):
            nonlocal rights  # they go with the first byte
            done = self.socket.sendmsg(pieces, rights)
            rights = []
            return done

        try:
            _write_all(write, [frame, head, *buffers])
        except OSError as error:
            raise ConnectionLost(str(error)) from error
        finally:
            for fd in fds:
                os.close(fd)

    def receive(self):
        frame, fds = bytearray(FRAME.size), []
        try:
            self._read(memoryview(frame), fds)
            magic, version, count, size = FRAME.unpack(frame)
            if magic != MAGIC or version != VERSION or count != len(fds) or count > 1 or size > MAX_BLOB:
                raise BadData("message: the other side does not speak this version of the protocol")
            if fds:
                if fcntl.fcntl(fds[0], fcntl.F_GET_SEALS) & _SEALS != _SEALS or os.fstat(fds[0]).st_size != size:
                    raise BadData("message: its descriptor is not a sealed memfd of the length that the frame says")
                # Private: arrays over it may be written to, and a page that is only read is not copied.
                blob = mmap.mmap(fds[0], size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
                try:
                    blob.madvise(_MADV_POPULATE_READ)
                except OSError:  # before Linux 5.14 the pages are mapped one by one
                    pass
                return decode(blob)
        finally:
            for fd in fds:
                os.close(fd)
        blob = bytearray()
        while len(blob) < size:  # a length is only believed as its bytes arrive
            part = bytearray(min(size - len(blob), max(INLINE, len(blob))))
            self._read(memoryview(part), None)
            blob += part
        return decode(blob)

    def wait_for_end(self, seconds):
        """Returns when the other side has closed, or when the time is over."""
        try:
            self.socket.settimeout(seconds)
            while self.socket.recv(4096):
                pass
        except OSError:
            pass

    def close(self):
        self.socket.close()
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None

    def _read(self, view, fds):
        while view:
            ready = [fd for fd, _ in self._poll.poll()]
            if self.socket.fileno() not in ready:  # the process has ended, and what it sent before is read
                raise ConnectionLost("the process ended")
            try:
                if fds is None:
                    done = self.socket.recv_into(view)
                else:
                    # A program that another thread starts meanwhile inherits none of them.
                    room = socket.CMSG_SPACE(4 * 4)
                    data, ancillary, _, _ = self.socket.recvmsg(len(view), room, socket.MSG_CMSG_CLOEXEC)
                    done = len(data)
                    view[:done] = data
                    for level, kind, payload in ancillary:
                        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                            fds.extend(struct.unpack(f"{len(payload) // 4}i", payload[: len(payload) // 4 * 4]))
            except OSError as error:
                raise ConnectionLost(str(error)) from error
            if not done:
                raise ConnectionLost("the connection ended")
            view = view[done:]

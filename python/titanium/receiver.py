"""Weights from a stream into a Hugging Face folder, or into arrays in memory (titanium/weights/sync_wire.h, docs/serve.md).

    receiver = Receiver("path/of/a/folder")          # or a dict of torch tensors or numpy arrays
    report = receiver.take_stream(engine.get_per_tensor_param())
    for message in messages:                         # or message by message, each a safetensors blob
        report = receiver.take(message)              # None until the last one

A folder changes when a stream has ended well, by one rename, and not at all otherwise.  Arrays are written in place,
bucket by bucket: a stream that breaks leaves those updated that came before.  Needs numpy or torch.
"""

import contextlib
import json
import math
import mmap
import os
import re
import struct
import sys
from collections.abc import MutableMapping
from dataclasses import dataclass, field

from .arrays import DTYPES, ArrayFactory, Raw, to_raw
from .errors import BadCheckpoint, BadConfig, BadData
from .xxh64 import total_checksum, tree_hash

_FLOATS = ("F64", "F32", "F16", "BF16")
_VERSION = "titanium.version"
_PARTIAL = ".sync-partial"
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_VERSIONED = re.compile(r"(.*)\.v\d+\.safetensors", re.S)
_MAX_HEADER = 100_000_000
_WHAT = "message of a stream of weights"


@dataclass
class Report:
    version: int
    updated: int = 0  # tensors
    bytes: int = 0  # of them, as they came
    not_updated: list = field(default_factory=list)  # of the target, sorted: the stream does not hold them
    unknown: list = field(default_factory=list)  # of the stream, in its order: the target does not have them


def parse_safetensors(data, what):
    """(metadata, name -> Raw over `data`) of a safetensors blob of any bytes; ValueError says what is wrong."""
    view = memoryview(data).cast("B") if len(data) else memoryview(b"")
    if len(view) < 8:
        raise ValueError(f"{what}: {len(view)} bytes, too short")
    (size,) = struct.unpack_from("<Q", view)
    if size > min(len(view) - 8, _MAX_HEADER):
        raise ValueError(f"{what}: a header of {size} bytes, but {len(view) - 8} follow: truncated")
    payload = view[8 + size :]
    try:
        header = json.loads(bytes(view[8 : 8 + size]))
        metadata = header.pop("__metadata__", {})
        if not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError("__metadata__ is not text")
        entries = sorted((*entry["data_offsets"], name, entry) for name, entry in header.items())
        tensors, at = {}, 0
        for begin, end, name, entry in entries:
            raw = Raw(entry["dtype"], entry["shape"], payload[begin:end])
            if any(not isinstance(n, int) or n < 0 for n in raw.shape) or raw.nbytes != end - begin:
                raise ValueError(f"tensor {name!r} does not fit its bytes")
            if begin != at:
                raise ValueError(f"tensor {name!r} begins at byte {begin}, expected {at}")
            at = end
            tensors[name] = raw
        if at != len(payload):
            raise ValueError(f"{len(payload)} bytes of tensors, expected {at}: truncated")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{what}: {error}") from None
    return metadata, tensors


class Receiver:
    """target: a folder with weights, or a dict of torch tensors or numpy arrays (bfloat16 in numpy: uint16 bits).

    Of a dict: convert takes another floating dtype than the stream's; create adds tensors that the dict lacks, made by
    `arrays` and `bf16` as those of spawn() are ("auto", "torch", "numpy"; "uint16", "float32").
    check: False skips the checksums.  fsync: return when a folder is on disk.
    """

    def __init__(self, target, *, convert=False, create=False, arrays="auto", bf16="uint16", check=True, fsync=True):
        if isinstance(target, (str, os.PathLike)):
            if convert or create:
                raise BadConfig(f"{target}: the tensors of a folder are neither converted nor added")
            self._target = _Folder(os.fspath(target), fsync)
        elif not isinstance(target, MutableMapping):
            raise BadConfig(f"target: a {type(target).__name__}; allowed: a folder, or a dict of tensors or arrays")
        else:
            self._target = _Dict(target, convert, ArrayFactory(arrays, bf16) if create else None)
        self._check = check
        self._open = None

    @property
    def version(self):
        """Of the last stream that ended well; None when there was none."""
        return self._target.version

    @property
    def open(self):
        return self._open is not None

    def drop(self):
        """Forgets an unfinished stream."""
        self._open = None
        self._target.drop()

    def take(self, message):
        """One message; the Report comes with the last one of a stream."""
        with self._dropping():
            try:
                metadata, tensors = parse_safetensors(message, _WHAT)
            except ValueError as error:
                raise BadData(str(error)) from None
            kind, version, index = metadata.get("kind"), _number(metadata, "version"), _number(metadata, "index")
            if kind not in ("weights.begin", "weights.bucket", "weights.end"):
                raise BadData(f"{_WHAT}: kind {kind!r} is none of weights.begin, weights.bucket, weights.end")
            if kind == "weights.begin":
                if index != 0:
                    raise BadData(f"a stream of weights begins with message {index}, not 0")
                return self._begin(version, _announced(metadata), _number(metadata, "buckets"))
            if self._open is None:
                raise BadData(f"message {index} of a stream of weights (version {version}) comes before its begin")
            if (version, index) != (self._open.version, self._open.next):
                raise BadData(
                    f"message {index} of version {version} of a stream of weights comes where message {self._open.next} of "
                    f"version {self._open.version} should"
                )
            if kind == "weights.bucket":
                return self._bucket(tensors, _checksums(metadata, tensors))
            return self._end(metadata.get("checksum"))

    def take_all(self, messages):
        report = None
        for message in messages:
            report = self.take(message)
        if report is None:
            self.drop()
            raise BadData("a stream of weights stopped before its end")
        return report

    def take_stream(self, stream):
        """A stream of Engine.get_per_tensor_param; the engine's arrays must hold bfloat16 as it is (bf16="uint16")."""
        with self._dropping():
            announced = {name: (dtype, tuple(shape)) for name, dtype, shape in stream.specs}
            self._begin(stream.version, announced, stream.buckets)
            for bucket in stream:
                tensors = {}
                for name, array in bucket.items():
                    raw = to_raw(array, name)
                    tensors[name] = Raw("BF16", raw.shape, raw.data, raw.keep) if raw.dtype == "U16" else raw
                self._bucket(tensors, None)
            if stream.checksum is None:
                raise BadData(f"a stream of weights (version {stream.version}) was closed before its end")
            return self._end(stream.checksum, made=stream.checksum != "0" * 16)

    @contextlib.contextmanager
    def _dropping(self):
        try:
            yield
        except BaseException:
            self.drop()
            raise

    def _begin(self, version, announced, buckets):
        if self._open is not None:
            raise BadData(
                f"a stream of weights (version {version}) begins before the one of version {self._open.version} has ended"
            )
        self._target.look()
        have = self._target.version
        if have is not None and version <= have:
            raise BadData(
                f"{self._target.what}: weights of version {version} came, but those here are of version {have} already"
            )
        stream = _Stream(version, announced, buckets)
        self._target.begin([name for name, (dtype, shape) in announced.items() if self._takes(name, dtype, shape)], version)
        self._open = stream

    def _takes(self, name, dtype, shape):
        """Whether the target has the tensor; BadData when it is another one there."""
        own = self._target.find(name)
        if own is None:
            return self._target.creates
        converts = self._target.converts and own[0] in _FLOATS
        if own[1] != tuple(shape) or (own[0] != dtype and not converts):
            raise BadData(
                f"{self._target.what}: tensor {name!r} comes as {dtype} {list(shape)}, but is {own[0]} {list(own[1])} here"
            )
        return True

    def _bucket(self, tensors, checksums):
        stream = self._open
        if stream.next > stream.buckets:
            raise BadData(f"a stream of weights has more than its {stream.buckets} buckets")
        known = {}  # the whole bucket is checked before any of it is applied
        for name, raw in tensors.items():
            if name in stream.came:
                raise BadData(f"tensor {name!r} comes twice")
            spec = stream.announced.get(name)
            if spec is None:
                raise BadData(f"tensor {name!r} comes unannounced")
            if spec != (raw.dtype, raw.shape):
                raise BadData(
                    f"tensor {name!r} comes as {raw.dtype} {list(raw.shape)}, but was announced as {spec[0]} {list(spec[1])}"
                )
            known[name] = self._takes(name, raw.dtype, raw.shape)
        sums = {name: 0 for name in tensors} if checksums is None else checksums
        if self._check:
            for name, raw in tensors.items():
                have = tree_hash(raw.data)
                if checksums is not None and have != checksums[name]:
                    raise BadData(
                        f"tensor {name!r} is damaged: its checksum is {have:016x}, the sender's {checksums[name]:016x}"
                    )
                sums[name] = have
        for name, raw in tensors.items():
            stream.came[name] = (raw.dtype, raw.shape, sums[name])
            if known[name]:
                self._target.apply(name, raw)
                stream.report.updated += 1
                stream.report.bytes += raw.nbytes
        stream.next += 1

    def _end(self, checksum, made=True):
        """made: False when the sender makes no checksums."""
        stream = self._open
        for name in stream.announced:
            if name not in stream.came:
                raise BadData(f"the stream of weights (version {stream.version}) ended without tensor {name!r}, which it announced")
        if stream.next != stream.buckets + 1:
            raise BadData(
                f"the stream of weights (version {stream.version}) ended after {stream.next - 1} of {stream.buckets} buckets"
            )
        if self._check and made:
            have = f"{total_checksum((name, *stream.came[name]) for name in stream.announced):016x}"
            if have != checksum:
                raise BadData(
                    f"the stream of weights (version {stream.version}) is damaged: its checksum is {have}, the sender's {checksum}"
                )
        report = stream.report
        report.unknown = [name for name in stream.announced if not self._target.creates and self._target.find(name) is None]
        report.not_updated = sorted(name for name in self._target.names() if name not in stream.came)
        self._target.commit(stream.version)
        self.drop()
        return report


class _Stream:
    def __init__(self, version, announced, buckets):
        self.version, self.announced, self.buckets = version, announced, buckets
        self.next = 1  # index of the message that comes now
        self.came = {}  # name -> dtype, shape, checksum
        self.report = Report(version)


def _number(metadata, key):
    text = metadata.get(key)
    if text is None or not re.fullmatch(r"[0-9]{1,19}", text):
        raise BadData(f"{_WHAT}: __metadata__ {key!r} is {text!r}, not a number from 0 up")
    return int(text)


def _announced(metadata):
    """name -> (dtype, shape), in the order of the stream."""
    announced, size = {}, 0
    try:
        for name, dtype, shape in json.loads(metadata["tensors"]):
            whole = all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in shape)
            if not isinstance(name, str) or dtype not in _FLOATS or not whole:
                raise ValueError(f"a tensor is announced as {[name, dtype, shape]}")
            if name in announced:
                raise ValueError(f"tensor {name!r} is announced twice")
            announced[name] = (dtype, tuple(shape))
            size += math.prod(shape) * DTYPES[dtype][0]
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise BadData(f"{_WHAT}: __metadata__ 'tensors': {error}") from None
    if _number(metadata, "bytes") != size:
        raise BadData(f"{_WHAT}: __metadata__ 'bytes' is {metadata['bytes']}, its tensors have {size}")
    return announced


def _checksums(metadata, tensors):
    try:
        sums = json.loads(metadata["checksums"])
        return {name: int(re.fullmatch(r"[0-9a-f]{16}", sums[name])[0], 16) for name in tensors}
    except (KeyError, TypeError, ValueError, RecursionError):
        raise BadData(f"{_WHAT}: not every tensor has a checksum of 16 hex digits") from None


class _Dict:
    what = "the tensors"

    def __init__(self, tensors, convert, factory):
        self._tensors, self.converts, self._factory = tensors, convert, factory
        self.creates = factory is not None
        self.version = None

    def names(self):
        return self._tensors.keys()

    def find(self, name):
        array = self._tensors.get(name)
        if array is None:
            return None
        if not hasattr(array, "dtype") or not hasattr(array, "shape"):
            raise BadConfig(f"{self.what}: {name!r} is a {type(array).__name__}; allowed: tensors and arrays")
        if getattr(getattr(array, "flags", None), "writeable", True) is False:
            raise BadConfig(f"{self.what}: {name!r} is an array that cannot be written to")
        dtype = str(array.dtype).rpartition(".")[2]
        named = {"uint16": "BF16", **{torch: name for name, (_, _, torch) in DTYPES.items() if name != "U16"}}
        return named.get(dtype, dtype), tuple(array.shape)

    def look(self):
        pass

    def begin(self, updated, version):
        pass

    def apply(self, name, raw):
        array = self._tensors.get(name)
        if array is None:
            copy = Raw(raw.dtype, raw.shape, bytearray(raw.data))
            self._tensors[name] = self._factory(copy)
            return
        if not raw.nbytes:
            return
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(array, torch.Tensor):
            data = bytearray(raw.data) if raw.data and memoryview(raw.data).readonly else raw.data
            with torch.no_grad():
                array.copy_(ArrayFactory("torch")(Raw(raw.dtype, raw.shape, data)))
            return
        if raw.dtype == "BF16" and str(array.dtype) in ("uint16", "bfloat16"):
            array.view("uint16")[...] = ArrayFactory("numpy")(raw)
        else:
            array[...] = ArrayFactory("numpy", "float32")(raw)

    def commit(self, version):
        self.version = version

    def drop(self):
        pass


class _Folder:
    """New files have the layout of the old ones and are written aside.  One file is renamed over the old one; shards get
    new names, so that the rename of the index is the moment when all of them count."""

    converts = creates = False

    def __init__(self, path, fsync):
        self.what, self._fsync = path, fsync
        self._files = []
        self.look()

    def names(self):
        return self._tensors.keys()

    def find(self, name):
        found = self._tensors.get(name)
        return None if found is None else (found.dtype, found.shape)

    def look(self):
        self.drop()
        self._index, self._old, self._tensors, self.version = None, [], {}, None
        if not os.path.isdir(self.what):
            raise BadCheckpoint(f"{self.what}: is not a folder")
        if os.path.exists(os.path.join(self.what, _SINGLE)):
            shards = [_SINGLE]
        else:
            shards = self._read_index()
        for shard in shards:
            old = _OldFile(self.what, shard)
            self._old.append(old)
            for name, raw in old.tensors.items():
                if name in self._tensors:
                    raise BadCheckpoint(f"{old.path}: tensor {name!r} is duplicated: it is in another file too")
                if self._index is not None and self._index["weight_map"].get(name) != shard:
                    raise BadCheckpoint(f"{old.path}: holds tensor {name!r}, which the index does not put there")
                self._tensors[name] = raw
        if self._index is not None:
            for name in self._index["weight_map"]:
                if name not in self._tensors:
                    raise BadCheckpoint(f"{self.what}: tensor {name!r} is missing from the file where the index puts it")
        text = self._old[0].metadata.get(_VERSION) if self._index is None else self._index["metadata"].get(_VERSION)
        if text is not None:
            if not re.fullmatch(r"[0-9]{1,19}", str(text)):
                raise BadCheckpoint(f"{self.what}: its metadata {_VERSION!r} is {text!r}, not a number from 0 up")
            self.version = int(text)

    def _read_index(self):
        path = os.path.join(self.what, _INDEX)
        try:
            with open(path, encoding="utf-8") as file:
                index = json.load(file)
            shards = sorted(set(index["weight_map"].values()))
            if not all(isinstance(s, str) and s not in ("", ".", "..") and "/" not in s and "\0" not in s for s in shards):
                raise ValueError("a shard must be a plain file name")
        except FileNotFoundError:
            raise BadCheckpoint(f"{self.what}: has neither {_SINGLE} nor {_INDEX}") from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise BadCheckpoint(f"{path}: {error}") from None
        if not isinstance(index.get("metadata"), dict):
            index["metadata"] = {}
        self._index = index
        return shards

    def begin(self, updated, version):
        self._clean()
        self._file_of = {}
        for old in self._old:
            touched = any(name in old.tensors for name in updated)
            if not touched and self._index is not None:
                continue  # the index goes on naming the old file
            name = old.name if self._index is None else f"{_stem(old.name)}.v{version}.safetensors"
            file = _NewFile(old, os.path.join(self.what, name), version)
            self._files.append(file)
            self._file_of.update(dict.fromkeys(old.tensors, file))

    def apply(self, name, raw):
        self._file_of[name].write(name, raw.data)

    def commit(self, version):
        for file in self._files:
            file.finish(self._fsync)
        placed = []
        try:
            for file in self._files:
                file.put_in_place()
                placed.append(file.path)
            if self._fsync:
                _sync_folder(self.what)
            if self._index is not None:
                index = {**self._index, "weight_map": dict(self._index["weight_map"])}
                index["metadata"] = {**index["metadata"], _VERSION: str(version)}
                index["weight_map"].update((name, os.path.basename(f.path)) for name, f in self._file_of.items())
                self._write_index(index)
        except OSError as error:
            if self._index is not None:
                for path in placed:
                    self._remove_unnamed(os.path.basename(path))
            raise BadCheckpoint(f"{self.what}: cannot be put in place: {error}") from error
        self.version = version
        if self._index is not None:
            for old in self._old:
                self._remove_unnamed(old.name)
            self._clean()

    def _write_index(self, index):
        path = os.path.join(self.what, _INDEX)
        with open(path + _PARTIAL, "w", encoding="utf-8") as file:
            json.dump(index, file, indent=2, ensure_ascii=False)
            file.write("\n")
            file.flush()
            if self._fsync:
                os.fsync(file.fileno())
        os.replace(path + _PARTIAL, path)
        self._index = index  # from here the new files count, whatever fails
        if self._fsync:
            _sync_folder(self.what)

    def drop(self):
        for file in self._files:
            file.discard()
        self._files = []

    def _remove_unnamed(self, name):
        if name not in self._index["weight_map"].values():
            _remove(os.path.join(self.what, name))

    def _clean(self):
        """What killed receivers left: files aside, and shards that no index came to name."""
        for name in os.listdir(self.what):
            if name.endswith(_PARTIAL):
                _remove(os.path.join(self.what, name))
            elif self._index is not None and _VERSIONED.fullmatch(name):
                self._remove_unnamed(name)


def _stem(name):
    versioned = _VERSIONED.fullmatch(name)
    return versioned[1] if versioned else name.removesuffix(".safetensors")


def _remove(path):
    with contextlib.suppress(OSError):
        os.remove(path)


def _sync_folder(path):
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class _OldFile:
    """A file of the folder, mapped: only its header is read."""

    def __init__(self, folder, name):
        self.name, self.path = name, os.path.join(folder, name)
        try:
            with open(self.path, "rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self.metadata, self.tensors = parse_safetensors(self._map, self.path)
        except OSError as error:
            raise BadCheckpoint(f"{self.path}: {error}") from None
        except ValueError as error:
            text = str(error)
            raise BadCheckpoint(text if text.startswith(self.path) else f"{self.path}: {text}") from None


class _NewFile:
    def __init__(self, old, path, version):
        self.path, self._old, self._written, self._offsets = path, old, set(), {}
        metadata = {"format": "pt", **old.metadata, _VERSION: str(version)}
        header, at = {"__metadata__": metadata}, 0
        for name, raw in old.tensors.items():
            header[name] = {"dtype": raw.dtype, "shape": list(raw.shape), "data_offsets": [at, at + raw.nbytes]}
            self._offsets[name] = at
            at += raw.nbytes
        text = json.dumps(header, ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        self._start = 8 + len(text)
        try:
            self._fd = os.open(path + _PARTIAL, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise BadCheckpoint(f"{path}: cannot be created: {error}") from None
        self._put(struct.pack("<Q", len(text)) + text, 0)

    def write(self, name, data):
        self._put(data, self._start + self._offsets[name])
        self._written.add(name)

    def finish(self, fsync):
        """Takes from the old file what did not come."""
        for name, raw in self._old.tensors.items():
            if name not in self._written:
                self.write(name, raw.data)
        if fsync:
            os.fsync(self._fd)

    def put_in_place(self):
        os.replace(self.path + _PARTIAL, self.path)
        os.close(self._fd)
        self._fd = None

    def discard(self):
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
            _remove(self.path + _PARTIAL)

    def _put(self, data, at):
        view = memoryview(data)
        try:
            while len(view):
                done = os.pwrite(self._fd, view[: 1 << 30], at)
                view, at = view[done:], at + done
        except OSError as error:
            raise BadCheckpoint(f"{self.path}: cannot be written: {error}") from error

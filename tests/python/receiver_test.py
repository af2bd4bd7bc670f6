"""titanium/receiver.py against a stream made by the C++ sender (tests/data/sync).  Needs numpy or torch; tests both where
both are there."""

import os
import random
import struct
import sys
import tempfile
import unittest
import unittest.mock

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "python"))

from titanium import xxh64  # noqa: E402
from titanium.errors import BadCheckpoint, BadConfig, BadData  # noqa: E402
from titanium.receiver import Receiver, parse_safetensors  # noqa: E402

LIBRARIES = {}
for name, wrap in (("numpy", xxh64._Numpy), ("torch", xxh64._Torch)):
    try:
        LIBRARIES[name] = wrap(__import__(name))
    except (ImportError, OSError):
        pass

DATA = os.path.join(ROOT, "tests/data/sync")


def read(path):
    with open(path, "rb") as file:
        return file.read()


MESSAGES = [read(os.path.join(DATA, f"message-{i}.bin")) for i in range(len(os.listdir(DATA)) - 1)]
WANT = read(os.path.join(DATA, "want.safetensors"))
TENSORS = parse_safetensors(WANT, "want")[1]


def safetensors(tensors, metadata):
    """name -> (dtype, shape, bytes); independent of the package."""
    import json

    header, at = {"__metadata__": metadata}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values())


def older():
    return {name: (raw.dtype, raw.shape, bytes(raw.nbytes)) for name, raw in TENSORS.items()}


def files_of(folder):
    return {name: read(os.path.join(folder, name)) for name in os.listdir(folder)}


def tensors_of(folder):
    return {
        name: (raw.dtype, raw.shape, bytes(raw.data))
        for file, data in files_of(folder).items()
        if file.endswith(".safetensors")
        for name, raw in parse_safetensors(data, file)[1].items()
    }


class HashTest(unittest.TestCase):
    def test_known_values(self):
        # Of xxhsum -H1.
        self.assertEqual(xxh64.xxh64(b""), 0xEF46DB3751D8E999)
        for size, value in ((1, 0xE934A84ADB052768), (5, 0xDD0274386E26030C), (33, 0x0C535D1ACAFB8EAD), (100, 0x6AC1E58032166597)):
            self.assertEqual(xxh64.xxh64(bytes(range(size))), value)

    def test_every_library_hashes_as_plain_python(self):
        self.assertTrue(LIBRARIES, "neither numpy nor torch")
        data = random.Random(1).randbytes(5 * 4096 + 13)
        for size in (0, 3, 4095, 4096, 4097, len(data)):
            leaves = b"".join(struct.pack("<Q", xxh64.xxh64(data[i : min(i + 4096, size)])) for i in range(0, size, 4096))
            for name, library in LIBRARIES.items():
                self.assertEqual(xxh64.tree_hash(data[:size], library), xxh64.xxh64(leaves), (name, size))
        long = data * 205  # more than one block of leaves
        self.assertEqual(len({xxh64.tree_hash(long, library) for library in LIBRARIES.values()}), 1)


class DictTest(unittest.TestCase):
    def test_numpy_in_place(self):
        if "numpy" not in LIBRARIES:
            return
        import numpy

        bits = {n: numpy.zeros(r.shape, "uint16" if r.dtype == "BF16" else "float32") for n, r in TENSORS.items()}
        kept = dict(bits)
        report = Receiver(bits).take_all(MESSAGES)
        self.assertEqual((report.version, report.updated, report.not_updated, report.unknown), (7, len(TENSORS), [], []))
        self.assertEqual(report.bytes, sum(raw.nbytes for raw in TENSORS.values()))
        for name, raw in TENSORS.items():
            self.assertIs(bits[name], kept[name])
            self.assertEqual(bits[name].tobytes(), bytes(raw.data), name)

        wide = {name: numpy.zeros(raw.shape, "float32") for name, raw in TENSORS.items()}
        with self.assertRaisesRegex(BadData, "comes as BF16 .*but is F32"):
            Receiver(wide).take_all(MESSAGES)
        Receiver(wide, convert=True).take_all(MESSAGES)
        made = {}
        Receiver(made, create=True, arrays="numpy", bf16="float32").take_all(MESSAGES)
        for name, raw in TENSORS.items():
            if raw.dtype == "BF16":
                want = (bits[name].astype("uint32") << 16).view("float32")
                self.assertEqual(wide[name].tobytes(), want.tobytes())
            self.assertEqual(made[name].tobytes(), wide[name].tobytes(), name)
            self.assertEqual(made[name].shape, wide[name].shape)

    def test_torch_in_place(self):
        if "torch" not in LIBRARIES:
            return
        import torch

        tensors = {n: torch.zeros(r.shape, dtype=torch.bfloat16 if r.dtype == "BF16" else torch.float32) for n, r in TENSORS.items()}
        turned = torch.zeros(96, 48, dtype=torch.bfloat16).t()
        tensors["model.embed_tokens.weight"] = turned
        wide = {name: torch.nn.Parameter(torch.zeros(raw.shape)) for name, raw in TENSORS.items()}
        Receiver(tensors).take_all(MESSAGES)
        Receiver(wide, convert=True).take_all(MESSAGES)
        made = {}
        Receiver(made, create=True, arrays="torch").take_all(MESSAGES)
        for name, raw in TENSORS.items():
            flat = made[name].reshape(-1)
            data = flat.view(torch.uint8).numpy().tobytes() if "numpy" in LIBRARIES else bytes(flat.view(torch.uint8).tolist())
            self.assertEqual(data, bytes(raw.data), name)
            self.assertTrue(torch.equal(tensors[name], made[name]), name)
            self.assertTrue(torch.equal(wide[name], made[name].float()), name)
        self.assertIs(tensors["model.embed_tokens.weight"], turned)

    def test_stream_of_the_client(self):
        class Stream:
            version = 9

            def __init__(self, buckets, checksum):
                self._buckets, self.buckets, self.checksum = buckets, len(buckets), checksum
                self.specs = announced_specs()

            def __iter__(self):
                return iter(self._buckets)

        library = next(iter(LIBRARIES))
        made = {}
        Receiver(made, create=True, arrays=library).take_all(MESSAGES)
        checksum = parse_safetensors(MESSAGES[-1], "end")[0]["checksum"]
        order = [name for message in MESSAGES[1:-1] for name in parse_safetensors(message, "m")[1]]
        announced = [name for name, _, _ in announced_specs()]
        self.assertEqual(sorted(order), sorted(announced))
        buckets = [{name: made[name]} for name in announced]
        with tempfile.TemporaryDirectory() as folder:
            with open(os.path.join(folder, "model.safetensors"), "wb") as file:
                file.write(safetensors(older(), {}))
            receiver = Receiver(folder)
            report = receiver.take_stream(Stream(buckets, checksum))
            self.assertEqual((report.updated, report.version, receiver.version), (len(TENSORS), 9, 9))
            self.assertEqual(tensors_of(folder), {n: (r.dtype, r.shape, bytes(r.data)) for n, r in TENSORS.items()})
            stream = Stream(buckets, "1" * 16)
            stream.version = 10
            before = files_of(folder)
            with self.assertRaisesRegex(BadData, "is damaged"):
                receiver.take_stream(stream)
            stream.buckets += 1
            with self.assertRaisesRegex(BadData, f"ended after {len(buckets)} of {len(buckets) + 1} buckets"):
                receiver.take_stream(stream)
            with self.assertRaisesRegex(BadData, f"ended without tensor '{announced[-1]}'"):
                stream = Stream(buckets[:-1], checksum)
                stream.version = 10
                receiver.take_stream(stream)
            self.assertEqual(files_of(folder), before)
            stream = Stream(buckets, "0" * 16)  # whose sender makes no checksums
            stream.version = 11
            self.assertEqual(receiver.take_stream(stream).updated, len(TENSORS))

        # The last tensor does not fit: known before the first is written.
        arrays = {}
        Receiver(arrays, create=True, arrays=library).take_all(MESSAGES)
        for array in arrays.values():
            array[...] = 0
        arrays[announced[-1]] = arrays[announced[-1]][1:]
        with self.assertRaisesRegex(BadData, "comes as"):
            Receiver(arrays).take_stream(Stream(buckets, checksum))
        self.assertFalse(any(bool((array != 0).any()) for array in arrays.values()))


def announced_specs():
    import json

    return json.loads(parse_safetensors(MESSAGES[0], "begin")[0]["tensors"])


class FolderTest(unittest.TestCase):
    def folders(self):
        """A folder with one file, and one with shards; zeros of the right shapes."""
        import json

        for shards in (1, 2):
            with tempfile.TemporaryDirectory() as folder:
                names = sorted(TENSORS)
                parts = [names] if shards == 1 else [names[:2], names[2:]]
                weight_map = {}
                for i, part in enumerate(parts):
                    file = "model.safetensors" if shards == 1 else f"model-{i + 1:05}-of-00002.safetensors"
                    weight_map.update(dict.fromkeys(part, file))
                    with open(os.path.join(folder, file), "wb") as out:
                        out.write(safetensors({name: older()[name] for name in part}, {"format": "pt"}))
                if shards > 1:
                    with open(os.path.join(folder, "model.safetensors.index.json"), "w") as out:
                        json.dump({"metadata": {"total_size": 1}, "weight_map": weight_map}, out)
                with self.subTest(shards=shards):
                    yield folder, shards

    def test_bit_equal_and_the_version_stays(self):
        for folder, shards in self.folders():
            count = len(os.listdir(folder))
            receiver = Receiver(folder)
            self.assertIsNone(receiver.version)
            report = receiver.take_all(MESSAGES)
            self.assertEqual((report.version, report.updated, report.not_updated, report.unknown), (7, len(TENSORS), [], []))
            self.assertEqual(tensors_of(folder), {n: (r.dtype, r.shape, bytes(r.data)) for n, r in TENSORS.items()})
            self.assertEqual(len(os.listdir(folder)), count)
            before = files_of(folder)
            for again in (receiver, Receiver(folder)):
                with self.assertRaisesRegex(BadData, "weights of version 7 came, but those here are of version 7"):
                    again.take_all(MESSAGES)
            self.assertEqual(files_of(folder), before)

    def test_broken_streams_change_nothing(self):
        for folder, shards in self.folders():
            before = files_of(folder)
            receiver = Receiver(folder)

            def broken(messages, says):
                with self.assertRaisesRegex(BadData, says):
                    receiver.take_all(messages)
                self.assertFalse(receiver.open)
                self.assertEqual(files_of(folder), before)

            for i in range(1, len(MESSAGES) - 1):
                damaged = bytearray(MESSAGES[i])
                if parse_safetensors(MESSAGES[i], "m")[1] and damaged[-1:] != b"}":
                    damaged[-1] ^= 1
                    broken([*MESSAGES[:i], bytes(damaged), *MESSAGES[i + 1 :]], "is damaged: its checksum is")
                broken([*MESSAGES[:i], MESSAGES[i][:-1], *MESSAGES[i + 1 :]], "truncated")
                broken(MESSAGES[:i] + MESSAGES[i + 1 :], "where message")
                broken(MESSAGES[: i + 1] + MESSAGES[i:], "where message")
            broken(MESSAGES[1:], "comes before its begin")
            broken(MESSAGES[:-1], "stopped before its end")
            broken([MESSAGES[0], *MESSAGES], "before the one of version 7 has ended")
            broken([b"", *MESSAGES], "too short")
            rng = random.Random(3)
            for _ in range(500):  # any bytes
                messages = list(MESSAGES)
                i = rng.randrange(len(messages))
                data = bytearray(messages[i])
                for _ in range(rng.randrange(1, 4)):
                    data[rng.randrange(min(len(data), 600))] = rng.randrange(256)
                messages[i] = bytes(data)
                try:
                    Receiver(folder, fsync=False).take_all(messages[: max(i + 1, 2)])
                except BadData:
                    pass
            self.assertEqual(files_of(folder), before)
            for name in ("model.safetensors.sync-partial", *(["model-00001-of-00002.v3.safetensors"] if shards > 1 else [])):
                with open(os.path.join(folder, name), "wb") as file:
                    file.write(b"of a receiver that was killed")
            receiver.take_all(MESSAGES)
            self.assertEqual(len(os.listdir(folder)), len(before))

    def test_a_failure_after_the_index_keeps_the_new_files(self):
        import json

        from titanium import receiver

        for folder, shards in self.folders():
            if shards == 1:
                continue
            before = files_of(folder)
            for calls in (1, 2):  # of the folder's flushes, which one fails: before the new index, after it
                left = iter(range(calls - 1))

                def fail(path):
                    if next(left, None) is None:
                        raise OSError("no such luck")

                with unittest.mock.patch.object(receiver, "_sync_folder", fail):
                    with self.assertRaisesRegex(BadCheckpoint, "no such luck"):
                        Receiver(folder).take_all(MESSAGES)
                if calls == 1:
                    self.assertEqual(files_of(folder), before)
            self.assertEqual(Receiver(folder).version, 7)
            index = json.loads(read(os.path.join(folder, "model.safetensors.index.json")))
            for name, file in index["weight_map"].items():
                tensors = parse_safetensors(read(os.path.join(folder, file)), file)[1]
                self.assertEqual(bytes(tensors[name].data), bytes(TENSORS[name].data), name)

    def test_reports_and_refusals(self):
        for folder, shards in self.folders():
            name = "model.safetensors" if shards == 1 else "model-00001-of-00002.safetensors"
            path = os.path.join(folder, name)
            tensors = {n: (r.dtype, r.shape, bytes(r.data)) for n, r in parse_safetensors(read(path), path)[1].items()}
            if shards == 1:
                tensors["extra"] = ("BF16", (2,), b"abcd")
                del tensors["model.norm.weight"]
                with open(path, "wb") as file:
                    file.write(safetensors(tensors, {}))
                report = Receiver(folder).take_all(MESSAGES)
                self.assertEqual((report.not_updated, report.unknown), (["extra"], ["model.norm.weight"]))
                self.assertEqual(tensors_of(folder)["extra"][2], b"abcd")
            else:
                tensors["model.embed_tokens.weight"] = ("BF16", (96, 48), bytes(96 * 48 * 2))
                with open(path, "wb") as file:
                    file.write(safetensors(tensors, {}))
                before = files_of(folder)
                with self.assertRaisesRegex(BadData, r"comes as BF16 \[48, 96\], but is BF16 \[96, 48\] here"):
                    Receiver(folder).take_all(MESSAGES)
                self.assertEqual(files_of(folder), before)
            with self.assertRaises(BadConfig):
                Receiver(folder, convert=True)


if __name__ == "__main__":
    unittest.main()

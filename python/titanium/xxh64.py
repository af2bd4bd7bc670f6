"""The checksums of weight streams (titanium/weights/hash.h): XXH64 of the XXH64 of each 4096 bytes.  The pieces are
hashed side by side by numpy or torch; https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md."""

import struct

P1, P2, P3, P4, P5 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
LEAF = 4096
_STEPS = LEAF // 32
_MASK = (1 << 64) - 1
_BLOCK = 1024  # leaves at a time


def _rotl(x, r):
    return ((x << r) | (x >> (64 - r))) & _MASK


def _mix(lane, word):
    return _rotl((lane + word * P2) & _MASK, 31) * P1 & _MASK


def xxh64(data):
    """XXH64 with seed 0 of any bytes."""
    size, at = len(data), 0
    if size >= 32:
        a, b, c, d = (P1 + P2) & _MASK, P2, 0, -P1 & _MASK
        for a1, b1, c1, d1 in struct.iter_unpack("<4Q", memoryview(data)[: size // 32 * 32]):
            a, b, c, d = _mix(a, a1), _mix(b, b1), _mix(c, c1), _mix(d, d1)
        at = size // 32 * 32
        h = (_rotl(a, 1) + _rotl(b, 7) + _rotl(c, 12) + _rotl(d, 18)) & _MASK
        for lane in (a, b, c, d):
            h = ((h ^ _mix(0, lane)) * P1 + P4) & _MASK
    else:
        h = P5
    h = (h + size) & _MASK
    while size - at >= 8:
        h = (_rotl(h ^ _mix(0, struct.unpack_from("<Q", data, at)[0]), 27) * P1 + P4) & _MASK
        at += 8
    if size - at >= 4:
        h = (_rotl(h ^ (struct.unpack_from("<I", data, at)[0] * P1 & _MASK), 23) * P2 + P3) & _MASK
        at += 4
    for byte in bytes(data[at:]):
        h = _rotl(h ^ (byte * P5 & _MASK), 11) * P1 & _MASK
    h = (h ^ h >> 33) * P2 & _MASK
    h = (h ^ h >> 29) * P3 & _MASK
    return h ^ h >> 32


class _Numpy:
    def __init__(self, numpy):
        self.numpy = numpy
        self.constant = self.numpy.uint64

    def words(self, view):
        return self.numpy.frombuffer(view, dtype="<u8")

    def lanes(self, words, leaves):
        """[leaf, step, lane] -> [step][lane, leaf], so that each step works on what lies together."""
        return self.numpy.ascontiguousarray(words.reshape(leaves, _STEPS, 4).transpose(1, 2, 0))

    def filled(self, values, leaves):
        return self.numpy.repeat(self.numpy.array(values, dtype="uint64")[:, None], leaves, axis=1)

    def out(self, h):
        return h.astype("<u8").tobytes()


class _Torch:
    """int64 wraps around as uint64 does; only shifts to the right must lose the sign, which the masks see to."""

    def __init__(self, torch):
        self.torch = torch

    def constant(self, value):
        return value - (1 << 64) if value >= 1 << 63 else value

    def words(self, view):
        return self.torch.frombuffer(bytearray(view), dtype=self.torch.int64)

    def lanes(self, words, leaves):
        return words.reshape(leaves, _STEPS, 4).permute(1, 2, 0).contiguous()

    def filled(self, values, leaves):
        return self.torch.tensor([self.constant(v) for v in values])[:, None].repeat(1, leaves)

    def out(self, h):
        return struct.pack(f"<{len(h)}q", *h.tolist())


def _library():
    try:
        import numpy

        return _Numpy(numpy)
    except ImportError:
        import torch

        return _Torch(torch)


def _leaves(view, lib):
    """The hashes, little endian, of whole leaves."""
    n = len(view) // LEAF
    k1, k2, k3, k4 = (lib.constant(p) for p in (P1, P2, P3, P4))

    def right(x, r):
        return (x >> lib.constant(r)) & lib.constant((1 << (64 - r)) - 1)

    def rotate(x, r):
        low = right(x, 64 - r)
        x <<= lib.constant(r)
        x |= low
        return x

    acc = lib.filled([(P1 + P2) & _MASK, P2, 0, -P1 & _MASK], n)
    words = lib.lanes(lib.words(view) * k2, n)
    for step in words:
        acc += step
        rotate(acc, 31)
        acc *= k1
    mixed = rotate(acc * k2, 31) * k1
    a, b, c, d = (acc[i] for i in range(4))
    h = rotate(a, 1) + rotate(b, 7) + rotate(c, 12) + rotate(d, 18)
    for i in range(4):
        h = (h ^ mixed[i]) * k1 + k4
    h = h + lib.constant(LEAF)
    h = (h ^ right(h, 33)) * k2
    h = (h ^ right(h, 29)) * k3
    return lib.out(h ^ right(h, 32))


def tree_hash(data, library=None):
    view = memoryview(data)
    whole = len(view) // LEAF * LEAF
    hashes = bytearray()
    if whole:
        library = library or _library()
        for at in range(0, whole, _BLOCK * LEAF):
            hashes += _leaves(view[at : min(at + _BLOCK * LEAF, whole)], library)
    if whole < len(view):
        hashes += struct.pack("<Q", xxh64(view[whole:]))
    return xxh64(hashes)


def total_checksum(tensors):
    """Over (name, dtype, shape, checksum) of each tensor, in the order of the stream."""
    lines = (f"{name} {dtype} [{','.join(map(str, shape))}] {sum:016x}\n" for name, dtype, shape, sum in tensors)
    return xxh64("".join(lines).encode())

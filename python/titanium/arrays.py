"""Arrays in, bytes out, and back: torch tensors, numpy arrays and lists, with either library absent."""

import array
import ctypes
import operator
import sys

from .errors import BadConfig, BadData

# safetensors dtype -> (bytes, numpy's name, torch's name); numpy has no bfloat16
DTYPES = {
    "F64": (8, "float64", "float64"),
    "F32": (4, "float32", "float32"),
    "F16": (2, "float16", "float16"),
    "BF16": (2, "uint16", "bfloat16"),
    "I64": (8, "int64", "int64"),
    "I32": (4, "int32", "int32"),
    "I16": (2, "int16", "int16"),
    "I8": (1, "int8", "int8"),
    "U8": (1, "uint8", "uint8"),
    "U16": (2, "uint16", "uint16"),
    "U32": (4, "uint32", "uint32"),
    "U64": (8, "uint64", "uint64"),
    "BOOL": (1, "bool", "bool"),
}
_FROM_NUMPY = {numpy: name for name, (_, numpy, _) in DTYPES.items() if name != "BF16"}
_FROM_TORCH = {torch: name for name, (_, _, torch) in DTYPES.items()}


class Raw:
    """The bytes of an array: a safetensors dtype, a shape, and a buffer of C order."""

    __slots__ = ("dtype", "shape", "data", "keep")

    def __init__(self, dtype, shape, data, keep=None):
        self.dtype, self.shape, self.data, self.keep = dtype, tuple(shape), data, keep

    @property
    def nbytes(self):
        count = DTYPES[self.dtype][0]
        for size in self.shape:
            count *= size
        return count


def integer(value, what, kind=BadConfig):
    """An int, numpy's included; never a part of a number."""
    if not isinstance(value, bool):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise kind(f"{what} is {value!r}; allowed: an integer")


def flag(value, what, kind=BadConfig):
    """A bool, numpy's included: any text would count as true."""
    if isinstance(value, bool) or type(value).__name__ in ("bool_", "bool"):
        return bool(value)
    raise kind(f"{what} is {value!r}; allowed: True, False")


def _is_torch(value):
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def to_raw(value, what="array"):
    """Takes a torch tensor (any device), a numpy array or a flat list; copies only what is not contiguous on the CPU."""
    if isinstance(value, Raw):
        return value
    if _is_torch(value):
        try:
            tensor = value.detach().cpu().resolve_neg().contiguous()
        except (RuntimeError, NotImplementedError) as error:  # sparse, meta
            raise BadData(f"{what}: a tensor of layout {value.layout} on {value.device} cannot be sent: {error}") from None
        dtype = _FROM_TORCH.get(str(tensor.dtype).rpartition(".")[2])
        if dtype is None:
            raise BadData(f"{what}: dtype {tensor.dtype} cannot be sent")
        size = tensor.numel() * tensor.element_size()
        data = memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B") if size else b""
        return Raw(dtype, tensor.shape, data, tensor)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
        values = numpy.ascontiguousarray(value).reshape(numpy.shape(value))
        if values.dtype.byteorder == ">":
            values = values.astype(values.dtype.newbyteorder("<"))
        dtype = _FROM_NUMPY.get(values.dtype.name)
        if dtype is None:
            raise BadData(f"{what}: dtype {values.dtype} cannot be sent")
        return Raw(dtype, values.shape, values.reshape(-1).view("uint8").data if values.size else b"", values)
    try:
        values = list(value)
        if all(isinstance(x, int) for x in values):
            return Raw("I64", (len(values),), memoryview(array.array("q", values)).cast("B") if values else b"")
        return Raw("F64", (len(values),), memoryview(array.array("d", values)).cast("B"))
    except (TypeError, ValueError, OverflowError) as error:
        raise BadData(
            f"{what}: a {type(value).__name__} is not a flat array of numbers ({error}); rows go end to end, with offsets"
        ) from None


def raw_to_list(raw):
    """The numbers of a small array of dtype F64 or I64."""
    out = array.array({"F64": "d", "I64": "q"}[raw.dtype])
    out.frombytes(raw.data)
    return out.tolist()


class ArrayFactory:
    """Makes what results consist of.  kind: "torch", "numpy", or "auto": torch where the caller has imported it already."""

    def __init__(self, kind="auto", bf16="uint16"):
        if kind not in ("auto", "torch", "numpy"):
            raise BadConfig(f"arrays: {kind!r} is none of 'auto', 'torch', 'numpy'")
        if bf16 not in ("uint16", "float32"):
            raise BadConfig(f"bf16: {bf16!r} is neither 'uint16' nor 'float32'")
        if kind == "auto":
            kind = "torch" if "torch" in sys.modules else "numpy"
            if kind == "numpy":
                try:
                    import numpy  # noqa: F401
                except ImportError:
                    kind = "torch"
        self.kind, self.bf16 = kind, bf16
        try:
            self.library = __import__(kind)
        except ImportError as error:
            raise BadConfig(f"arrays: {kind} cannot be imported: {error}") from error

    def __call__(self, raw):
        """An array over the buffer itself, without a copy (but for bfloat16 as float32)."""
        _, numpy_name, torch_name = DTYPES[raw.dtype]
        if self.kind == "torch":
            dtype = getattr(self.library, torch_name)
            if raw.nbytes == 0:
                return self.library.empty(raw.shape, dtype=dtype)
            return self.library.frombuffer(raw.data, dtype=dtype).reshape(raw.shape)
        values = self.library.frombuffer(raw.data, dtype=numpy_name).reshape(raw.shape)
        if raw.dtype == "BF16" and self.bf16 == "float32":
            return (values.astype("uint32") << 16).view("float32")
        return values

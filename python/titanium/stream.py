"""A stream of weights out of an engine."""

from .errors import BadConfig


class _Open:
    """What the engine knows of a stream: it must not keep the stream itself, whose end is the sign to close."""

    def __init__(self, id):
        self.id = id
        self.asked = False  # the next bucket is under way
        self.stashed = None  # it has come before it was wanted: a reply or an exception
        self.ended = self.dropped = False


class WeightStream:
    """Buckets of weights, each a dict from name to array in the documented order.  The next one is prepared while the
    caller works on one.  Arrays stay valid for as long as they are held.

    Until it has ended or was closed, or is forgotten, what would change the weights is refused.
    """

    def __init__(self, engine, body):
        self._engine, self._state = engine, _Open(body["stream"])
        self.adapter = body["adapter"]  # description of an adapter, when the stream holds one
        self.version = body["version"]
        self.specs = [(name, dtype, tuple(shape)) for name, dtype, shape in body["tensors"]]  # all that will come, in order
        self.nbytes, self.buckets = body["bytes"], body["buckets"]
        self.checksums = {}  # of the tensors so far, 16 hex digits each
        self.checksum = None  # of all of them; known at the end
        engine._stream = self._state
        engine._ask_bucket(self._state)

    def __iter__(self):
        return self

    def __next__(self):
        reply = self._engine._next_bucket(self._state)
        if reply is None:
            if self.checksum is None and not self._state.dropped:  # else it would look like one that is complete
                raise BadConfig("this stream of weights has ended before its last tensor: a later call closed it")
            raise StopIteration
        if reply.body["end"]:
            self.checksum = reply.body["checksum"]
            raise StopIteration
        names, checksums = reply.body["names"], reply.body["checksums"]
        self.checksums.update((name, checksums[name]) for name in names)
        return {name: self._engine._arrays(reply.tensors[name]) for name in names}

    def tensors(self):
        """(name, array) one by one."""
        for bucket in self:
            yield from bucket.items()

    def close(self):
        """Ends the stream before its end."""
        self._state.dropped = True
        self._engine._close_stream(self._state)
        self._state.stashed = None

    def __del__(self):
        self._state.dropped = True  # the next request closes it

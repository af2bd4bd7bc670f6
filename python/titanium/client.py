"""The engine behind `titanium serve`: `spawn` or `connect`, then the methods of BaseEngine."""

import contextlib
import os
import select
import socket
import threading
import weakref

from .arrays import ArrayFactory, flag, integer
from .batch import Stats, decode_output, encode_batch, encode_loss
from .errors import BadConfig, BadData, ServerDied, TitaniumError, from_kind
from .losses import encode_loss_answer
from .process import ServerProcess, describe_status, find_binary, open_pidfd, peer_pidfd, rank_environment
from .stream import WeightStream
from .wire import Channel, ConnectionLost, Message, encode, json_number

_END = 10.0  # seconds that a server has to end by itself


def spawn(
    config,
    *,
    binary=None,
    model_type="language_model",
    backend="titanium",
    device="cpu",
    arrays="auto",
    bf16="uint16",
    env=None,
    args=(),
    log=None,
    rank=None,
    world_size=None,
    local_rank=None,
    local_world_size=None,
    master_addr=None,
    master_port=None,
):
    """Starts a server of our own with an engine in it.  It ends with the engine, with this process, or with close().

    config: what EngineConfig reads, a dict.  binary: the `titanium` command (see find_binary).  arrays, bf16: what results
    are made of (ArrayFactory).  env, args: added to the server's.  log: takes its lines: a callable, a file, None for our
    stderr.

    rank and world_size: one of several servers, which meet at master_addr:master_port (every engine of a run needs a port of
    its own).  Without them the environment says it (RANK, WORLD_SIZE, ...; rank=0, world_size=1 for an engine that is alone).
    """
    factory = ArrayFactory(arrays, bf16)
    ranks = rank_environment(rank, world_size, local_rank, local_world_size, master_addr, master_port)
    if ranks is not None and isinstance(env, (dict, type(None))):  # else it is refused as it is
        env = {**ranks, **(env or {})}
    process = ServerProcess(find_binary(binary), args, env, log)
    engine = Engine(Channel(process.socket, open_pidfd(process.pid)), factory, process)
    with _closing_on_failure(engine):
        engine._create({"config": config, "model_type": model_type, "backend": backend, "device": device})
    return engine


def connect(
    address,
    *,
    config=None,
    model_type="language_model",
    backend="titanium",
    device="cpu",
    arrays="auto",
    bf16="uint16",
    timeout=10.0,
):
    """Speaks to a server that listens: "unix:/path", "unix:@name" or "tcp:127.0.0.1:port".

    With a config the server makes a new engine; without one its engine is taken as it is.  close() leaves server and engine
    as they are for the next client; when this process dies the server ends.
    """
    factory = ArrayFactory(arrays, bf16)
    sock = _connect(address, timeout)
    if not select.select([sock], [], [], timeout)[0]:  # a server greets at once
        sock.close()
        raise BadConfig(f"{address!a}: what listens there has not greeted within {timeout} s: no titanium server")
    engine = Engine(Channel(sock, peer_pidfd(sock)), factory, None, address)
    with _closing_on_failure(engine):
        if config is None:
            engine._attach()
        else:
            engine._create({"config": config, "model_type": model_type, "backend": backend, "device": device})
    return engine


@contextlib.contextmanager
def _closing_on_failure(engine):
    try:
        yield
    except TitaniumError:
        engine.close()
        raise
    except BaseException:
        engine._abandon()
        raise


def _connect(address, timeout):
    if not isinstance(address, str) or not isinstance(timeout, (int, float)) or not timeout > 0:
        raise BadConfig(f"connect: {address!r} with timeout {timeout!r}; allowed: a text, and seconds above 0")
    kind, _, rest = address.partition(":")
    try:
        if kind == "unix" and rest:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.settimeout(timeout)
                sock.connect("\0" + rest[1:] if rest[0] == "@" else rest)
            except BaseException:
                sock.close()
                raise
        elif kind == "tcp" and rest.rpartition(":")[2].isdecimal():
            host, _, port = rest.rpartition(":")
            sock = socket.create_connection((host.strip("[]"), int(port)), timeout)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        else:
            raise BadConfig(f"{address!r} is not an address; allowed: unix:/path, unix:@name, tcp:host:port")
    except (OSError, OverflowError, ValueError) as error:  # a name that cannot be one is a ValueError
        raise BadConfig(f"{address!a}: no server answers: {error}") from error
    sock.settimeout(None)
    return sock


class Engine:
    """One engine of one server.  Calls wait for one another; a call inside a loss callable is refused."""

    def __init__(self, channel, arrays, process=None, address=None):
        self._channel, self._arrays, self._process, self._address = channel, arrays, process, address
        self._lock = threading.RLock()
        self._in_call = None  # the method that waits for its reply
        self._next_id = 1
        self._ended = None  # why the connection is of no use any more
        self._modes = []
        self._groups, self._sent_groups = [], []
        self._stream = None  # the weight stream that is open
        self._owner = os.getpid()
        self._finish = weakref.finalize(self, _release, channel, process, os.getpid())
        try:
            greeting = channel.receive()
        except (ConnectionLost, BadData) as error:
            raise self._died("start", error) from None
        if greeting.type == "error":
            self._abandon(greeting.text)
            raise from_kind(greeting.name, greeting.text)
        self.info = greeting.body  # {"protocol", "pid", "created"}

    # -- life -----------------------------------------------------------------------------------------------------

    def initialize(self, config=None):
        """Reads the weights, makes optimizer and schedule.  config: replaces the one that the engine was made with."""
        if config is not None:
            self._create({**self._made_with, "config": config})
        self._take(self._call("initialize").body)

    def set_total_training_steps(self, steps):
        """Of the learning rate's schedule, which initialize() makes."""
        self._call("set_total_training_steps", {"steps": integer(steps, "set_total_training_steps: steps")})

    def close(self):
        """Ends the connection, and with it the server if it is our own.  Twice is once.  In a forked child: nothing."""
        if os.getpid() != self._owner:
            return
        with self._lock:
            if self._ended is None:
                with contextlib.suppress(ServerDied):
                    self._call("close")
                    self._channel.wait_for_end(_END)  # then the server is free for the next client
                self._ended = "it was closed"
            self._finish()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    # -- modes ----------------------------------------------------------------------------------------------------

    @property
    def mode(self):
        """"train", "eval", or None outside of both."""
        return self._modes[-1] if self._modes else None

    def train_mode(self, disable_auto_offload=False, zero_grad_on_exit=True):
        """A context manager: loads the state on entry, offloads it on exit, where the config asks for that."""
        args = {
            "disable_auto_offload": flag(disable_auto_offload, "train_mode: disable_auto_offload"),
            "zero_grad_on_exit": flag(zero_grad_on_exit, "train_mode: zero_grad_on_exit"),
        }
        return self._scope("train", args)

    def eval_mode(self, disable_auto_offload=False):
        return self._scope("eval", {"disable_auto_offload": flag(disable_auto_offload, "eval_mode: disable_auto_offload")})

    @contextlib.contextmanager
    def _scope(self, mode, args):
        self._call("enter_mode", {"mode": mode, **args})
        self._modes.append(mode)
        try:
            yield self
        except BaseException:
            self._modes.pop()
            if self._ended is None:
                with contextlib.suppress(TitaniumError):  # the first failure is the one to tell
                    self._call("exit_mode", {"failed": True})
            raise
        self._modes.pop()
        self._call("exit_mode", {"failed": False})

    # -- training -------------------------------------------------------------------------------------------------

    def forward_backward_batch(self, batch, loss=None, forward_only=False):
        """Forward of the whole batch and, unless forward_only, backward, which adds into the gradients."""
        return self._run("forward_backward_batch", batch, loss, {"forward_only": flag(forward_only, "forward_backward_batch: forward_only")})

    def forward_step(self, batch, loss=None):
        """The whole batch as one micro-batch, forward alone."""
        return self._run("forward_step", batch, loss, {})

    def train_batch(self, batch, loss):
        """Zero, forward and backward, update.  Adds the metric "grad_norm"."""
        return self._run("train_batch", batch, loss, {})

    def infer_batch(self, batch, loss=None):
        return self._run("infer_batch", batch, loss, {})

    def optimizer_zero_grad(self):
        self._call("optimizer_zero_grad")

    def optimizer_step(self):
        """The global gradient norm before clipping; when it is not finite nothing was updated."""
        return float(self._call("optimizer_step").body["grad_norm"])

    def lr_scheduler_step(self):
        """The learning rate of the next update."""
        body = self._call("lr_scheduler_step").body
        self._take(body)
        return float(body["lr"])

    @property
    def param_groups(self):
        """Dicts with lr, betas, eps, weight_decay; what is written into them holds from the next call."""
        return self._groups

    @property
    def optimizer(self):
        """Something with param_groups."""
        return _Optimizer(self)

    # -- weights, state -------------------------------------------------------------------------------------------

    def get_per_tensor_param(self, **options):
        """Full tensors under their Hugging Face names, as a WeightStream.

        options: dtype ("bfloat16" by default, "float32", ..., "master" for that of the masters), keep_fp32 (names), tied_head,
        bucket_bytes, version, checksums, threads.
        """
        try:
            encode(Message("method", "weights_begin", 0, options))
        except TitaniumError as error:  # it cannot be sent: the other ranks, which wait for this call, hear why
            if self.world_size > 1:
                with contextlib.suppress(TitaniumError):
                    self._call("weights_begin", {"refused by the client": ascii(str(error))})
            raise
        reply = self._call("weights_begin", options)
        return WeightStream(self, reply.body)

    def to(self, device, model=True, optimizer=True, grad=True):
        self._call("to", {"device": str(device), "model": model, "optimizer": optimizer, "grad": grad})

    def save_checkpoint(self, local_path, global_step=0, max_ckpt_to_keep=None):
        """When it returns the checkpoint is on disk.  max_ckpt_to_keep: None or 0 keeps all."""
        keep = 0 if max_ckpt_to_keep is None else integer(max_ckpt_to_keep, "save_checkpoint: max_ckpt_to_keep")
        args = {"global_step": integer(global_step, "save_checkpoint: global_step"), "max_ckpt_to_keep": keep}
        self._call("save_checkpoint", {**args, "local_path": _path(local_path, "save_checkpoint")})

    def load_checkpoint(self, local_path):
        """Takes that folder or raises BadCheckpoint."""
        self._take(self._call("load_checkpoint", {"local_path": _path(local_path, "load_checkpoint")}).body)

    @contextlib.contextmanager
    def disable_adapter(self):
        """Runs without the adapter inside."""
        self._call("enter_disable_adapter")
        try:
            yield self
        finally:
            if self._ended is None:
                self._call("exit_disable_adapter")

    # -- where it stands ------------------------------------------------------------------------------------------

    @property
    def rank(self):
        """Of this server among all that make up the engine."""
        return self._facts["rank"]

    @property
    def world_size(self):
        return self._facts["world_size"]

    def get_data_parallel_rank(self):
        return self._facts["data_parallel_rank"]

    def get_data_parallel_size(self):
        return self._facts["data_parallel_size"]

    def is_mp_src_rank_with_outputs(self):
        return self._facts["is_mp_src_rank_with_outputs"]

    @property
    def is_param_offload_enabled(self):
        return self._facts["is_param_offload_enabled"]

    @property
    def is_optimizer_offload_enabled(self):
        return self._facts["is_optimizer_offload_enabled"]

    # -- requests -------------------------------------------------------------------------------------------------

    def _create(self, args):
        self._facts = self._call("create", args).body  # where it is refused the old engine goes on
        self._groups, self._sent_groups, self._modes = [], [], []
        self._made_with = args

    def _attach(self):
        body = self._call("attach").body
        self._made_with, self._facts = body["made_with"], body["facts"]
        self._take(body)

    def _take(self, body):
        """Param groups as the engine has them, into the dicts that the caller may hold."""
        fresh = [
            {
                "lr": float(g["lr"]),
                "betas": tuple(float(b) for b in g["betas"]),
                "eps": float(g["eps"]),
                "weight_decay": float(g["weight_decay"]),
            }
            for g in body["param_groups"]
        ]
        if len(fresh) != len(self._groups):
            self._groups[:] = [{} for _ in fresh]
        for ours, theirs in zip(self._groups, fresh):
            ours.update(theirs)
        self._sent_groups = [dict(g) for g in self._groups]

    def _push_groups(self):
        if self._groups == self._sent_groups:
            return
        try:
            unknown = {key for g in self._groups for key in g} - {"lr", "betas", "eps", "weight_decay"}
            if unknown:
                raise ValueError(f"unknown key {sorted(map(str, unknown))[0]!r}")
            groups = [
                {
                    "lr": json_number(g["lr"]),
                    "betas": [json_number(b) for b in g["betas"]],
                    "eps": json_number(g["eps"]),
                    "weight_decay": json_number(g["weight_decay"]),
                }
                for g in self._groups
            ]
        except (KeyError, TypeError, ValueError) as error:
            raise BadConfig(f"param_groups: each holds lr, betas, eps and weight_decay as numbers: {error!r}") from error
        self._exchange("set_param_groups", {"param_groups": groups}, {}, None)
        self._sent_groups = [dict(g) for g in self._groups]

    def _run(self, method, batch, loss, args):
        batch_args, tensors = encode_batch(batch)
        args = {**args, **batch_args, "loss": encode_loss(loss)}
        reply = self._call(method, args, tensors, loss if callable(loss) else None)
        return decode_output(reply, self._arrays)

    def _call(self, method, args=None, tensors=None, loss=None):
        with self._calling(method):
            self._settle_stream()
            if method not in _ENDINGS:  # what ends something is not for a bad param group to stop
                self._push_groups()
            return self._exchange(method, args, tensors, loss)

    @contextlib.contextmanager
    def _calling(self, method):
        if os.getpid() != self._owner:  # its replies would be read by either
            raise BadConfig(f"{method}: this engine is process {self._owner}'s, not that of its fork {os.getpid()}")
        with self._lock:
            if self._in_call is not None:
                raise BadConfig(f"{method}: not possible inside a loss callable, while {self._in_call} runs")
            self._in_call = method
            try:
                yield
            finally:
                self._in_call = None

    def _ask_bucket(self, state):
        self._post("weights_next", {"stream": state.id}, None)
        state.asked = True

    def _settle_stream(self):
        """Takes in the bucket that is under way, whose reply comes first; closes a stream that nobody holds."""
        state = self._stream
        if state is None:
            return
        if state.asked:
            state.asked = False
            try:
                state.stashed = self._answer("weights_next")
                state.ended = state.stashed.body["end"]
            except TitaniumError as error:
                state.stashed, state.ended = error, True
        if state.dropped and not state.ended:
            state.ended = True
            self._exchange("weights_end", {"stream": state.id}, None, None)
        if state.ended:
            self._stream = None

    def _next_bucket(self, state):
        with self._calling("get_per_tensor_param"):
            if state.stashed is None and self._stream is state:
                if not state.asked:
                    self._ask_bucket(state)
                self._settle_stream()
            reply, state.stashed = state.stashed, None
            if isinstance(reply, BaseException):
                raise reply
            if self._stream is state and self._ended is None:
                self._ask_bucket(state)
            return reply

    def _close_stream(self, state):
        if self._stream is state and self._ended is None:
            with self._calling("close of the stream"):
                self._settle_stream()

    def _exchange(self, method, args, tensors, loss):
        """One request, the calls of the engine inside it, and its reply."""
        self._post(method, args, tensors)
        return self._answer(method, loss)

    def _post(self, method, args, tensors):
        if self._ended is not None:
            raise ServerDied(f"{method}: no titanium server: {self._ended}")
        try:
            self._channel.send(Message("method", method, self._next_id, args, tensors))
        except ConnectionLost as error:
            raise self._died(method, error) from None
        except TitaniumError:
            raise  # it cannot be sent, and nothing was
        except BaseException:
            self._abandon("an exception interrupted a request")
            raise
        self._next_id += 1

    def _answer(self, method, loss=None):
        failure = None
        while True:
            try:
                message = self._channel.receive()
            except (ConnectionLost, BadData) as error:
                raise self._died(method, error) from None
            except BaseException:  # KeyboardInterrupt: where in the stream we are is not known any more
                self._abandon("an exception interrupted the wait for a reply")
                raise
            if message.type == "method":
                failure = self._answer_call(method, message, loss) or failure
                continue
            if message.id not in (0, self._next_id - 1):
                self._abandon("its replies are out of order")
                raise ServerDied(f"{method}: the server answered request {message.id}, not {self._next_id - 1}")
            if failure is not None:
                raise failure
            if message.type == "error":
                raise from_kind(message.name, message.text)
            return message

    def _answer_call(self, method, message, loss):
        """Runs the loss callable for the engine.  Returns its exception, which the engine is told of."""
        try:
            if message.name != "loss" or loss is None:
                raise BadConfig(f"the engine asked for {message.name!r} inside {method}")
            reply = Message("reply", message.name, message.id)
            answer = loss(message.body["i"], Stats(message, self._arrays))
            encode_loss_answer(answer, reply)
        except BaseException as error:
            reply, failure = Message("error", "BadData", message.id, text=_text_of(error)), error
        else:
            failure = None
        try:
            try:
                self._channel.send(reply)
            except TitaniumError as error:  # it cannot be sent, and nothing was: the engine waits for a word
                self._channel.send(Message("error", "BadData", message.id, text=_text_of(error)))
                failure = error
        except ConnectionLost as error:
            raise self._died(method, error) from None
        except BaseException:
            self._abandon("an exception interrupted an answer")
            raise
        return failure

    def _died(self, method, error):
        """The exception that says how the server ended."""
        status, tail = (None, []) if self._process is None else self._process.wait(5)
        who = f"the titanium server at {self._address}" if self._process is None else "the titanium server"
        text = f"{method}: {who} {describe_status(status)} ({error})"
        if tail:
            text += "; its last lines:\n  " + "\n  ".join(tail[-20:])
        self._abandon(f"it {describe_status(status)}")
        return ServerDied(text, status, tail)

    def _abandon(self, why="it was given up"):
        self._ended = self._ended or why
        self._finish()


_ENDINGS = ("close", "exit_mode", "exit_disable_adapter")


def _path(value, what):
    try:
        text = os.fsdecode(value)
    except TypeError:
        raise BadConfig(f"{what}: local_path is {value!r}; allowed: a path") from None
    if not text or "\0" in text:
        raise BadConfig(f"{what}: local_path is {text!r}; allowed: a path, not empty and without a NUL")
    return os.path.abspath(text)


def _text_of(error):
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # its own __str__ may fail
        return type(error).__name__


class _Optimizer:
    def __init__(self, engine):
        self._engine = engine

    @property
    def param_groups(self):
        return self._engine.param_groups


def _release(channel, process, owner):
    """What the end of an engine frees, also when it is just forgotten or Python exits.  A forked child leaves it alone."""
    if os.getpid() != owner:
        return
    channel.close()
    if process is not None:
        process.wait(_END)

"""Processes that run a reward function.

Neither torch nor Lightning is imported here: a process starts as fast as the module of its function can be imported.
"""

from __future__ import annotations

import atexit
import io
import multiprocessing
import multiprocessing.util  # its own hook at exit, which waits for children, must be older than ours
import os
import pickle
import signal
import sys
import threading
import traceback
from contextlib import AbstractContextManager, nullcontext
from multiprocessing.connection import Connection
from typing import Any
from weakref import WeakSet

from comlrl_lightning.environment.reward import Measured, RewardCall, RewardFunction
from comlrl_lightning.utilities.calls import Place

REMEDY = 'or use reward_backend="thread"'
_STARTING = threading.Lock()
"""Held while a process starts: `multiprocessing` keeps a list of its children that threads must not share."""
_ENDING = threading.Event()
"""Set when this program ends: a process that started now would be waited for in vain."""
_UNPICKLABLE = (pickle.PickleError, AttributeError, TypeError, ValueError, RecursionError)


class WorkerTraceback(Exception):
    """Where an exception was raised in another process; the cause of the exception that is raised here."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


class RewardProcess:
    """A process of its own for one reward function, which starts with the first call and again after its end.

    Args:
        reward: The function. The process has a copy, and so the state that the function keeps.
    """

    def __init__(self, reward: RewardFunction) -> None:
        self.reward = reward
        self._preparing = threading.Lock()
        self._running: _Running | None = None

    def prepare(self) -> None:
        """Wait until the process can take calls.

        Raises:
            ValueError: If the function cannot be sent to a process, or be loaded there.
            RuntimeError: If the process ends while it starts.
        """
        with self._preparing:
            if self._running is None or self._running.has_ended():
                self._running = _Running(pickled(self.reward), self.reward.label)

    def run(self, call: RewardCall) -> Measured:
        """What the function gives for a call; its exceptions are raised here, caused by their traceback there.

        Raises:
            ValueError: If the call cannot be sent to a process.
            RuntimeError: If the process ends instead of answering.
        """
        assert self._running is not None
        try:
            message = pickle.dumps(call)
        except _UNPICKLABLE as error:
            raise ValueError(_not_sent(call.place, error)) from error
        kind, value, text = self._running.ask(message, self.reward.label, call.place)
        if kind == "unreadable":
            raise ValueError(_not_sent(call.place, text))
        if isinstance(value, BaseException):
            raise value from WorkerTraceback(text)
        assert isinstance(value, Measured)
        return value

    def stop(self) -> None:
        """Kill the process, whatever it does."""
        if self._running is not None:
            self._running.kill()


class _Running:
    """One started process and the pipe to it.

    Raises:
        ValueError: If the function cannot be loaded there.
        RuntimeError: If the process ends while it starts.
    """

    def __init__(self, function: bytes, label: str) -> None:
        context = multiprocessing.get_context("spawn")  # a copy of this process would share its threads and its GPU
        self._connection, theirs = context.Pipe()
        self._reaping, self._owner, self._is_over = threading.Lock(), os.getpid(), False
        # Not daemonic: rewards that run programs start processes of their own.
        self._process = context.Process(target=_serve, args=(theirs,), name="reward worker", daemon=False)
        with _STARTING:
            if _ENDING.is_set():
                raise RuntimeError(f"The program ends before a worker process for {label} has started.")
            self._process.start()
            _STARTED.add(self)
        theirs.close()
        try:
            self._connection.send_bytes(function)
            kind, _, text = pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            raise RuntimeError(
                f"A worker process for {label} {self._end()} while it started; what it wrote stands above. A script"
                " that trains must do so under if __name__ == '__main__':, since workers import it. Correct it, "
                f"{REMEDY}."
            ) from None
        if kind == "unreadable":
            self.kill()
            raise ValueError(
                f"{label} cannot be loaded in a worker process: {text}. Define it at the top level of a module that"
                f" can be imported, not in a notebook, {REMEDY}."
            )

    def ask(self, message: bytes, label: str, place: Place) -> tuple[str, object, str]:
        """Kind of the answer, the answer, and a text that belongs to it."""
        try:
            self._connection.send_bytes(message)
            answer = self._connection.recv_bytes()
        except (EOFError, OSError):
            raise RuntimeError(
                f"The worker process of {label} {self._end()} for {place}. Let the function raise an exception instead"
                " of ending its process, and look at what it does with memory and native code."
            ) from None
        kind, value, text = pickle.loads(answer)
        return kind, value, text

    def has_ended(self) -> bool:
        """Whether it takes no more calls."""
        if self._is_over or self._owner != os.getpid():
            return True
        with self._reaping:
            return not self._process.is_alive()

    def _end(self) -> str:
        """How the process ended, in words."""
        self._is_over = True
        with self._reaping:
            self._process.join(5)
            code = self._process.exitcode
        self._connection.close()
        if code is not None and code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"

    def kill(self) -> None:
        """End the process with all that it has started. Nobody waits for it but the one who reads from it."""
        if self._owner != os.getpid():
            return
        self._is_over = True
        with self._reaping:
            if self._process.is_alive() and not _kill_group(self._process.pid):
                self._process.kill()

    def __del__(self) -> None:
        self.kill()


_STARTED: WeakSet[_Running] = WeakSet()


@atexit.register
def _kill_all() -> None:
    with _STARTING:
        _ENDING.set()
        for running in list(_STARTED):
            running.kill()


def _kill_group(leader: int | None) -> bool:
    """Kill a process and what it has started; False if it leads no group, or none yet."""
    if sys.platform == "win32" or not leader:
        return False
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: object) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.nn.Module):
            raise ValueError(f"it holds a {type(value).__name__}, and modules of torch stay where they are")
        return NotImplemented


def pickled(reward: RewardFunction) -> bytes:
    """The function as a worker process gets it.

    Raises:
        ValueError: If it cannot be sent to another process.
    """
    file = io.BytesIO()
    try:
        _Pickler(file).dump(reward.without_processor())
    except _UNPICKLABLE as error:
        raise ValueError(
            f"{reward.label} cannot be sent to a worker process: {error}. Give a function, or an object of a class,"
            f" from the top level of a module, {REMEDY}."
        ) from error
    return file.getvalue()


def _not_sent(place: Place, reason: object) -> str:
    return f"{place} cannot be sent to a worker process: {reason}. Keep such objects out of task items, {REMEDY}."


def _serve(connection: Connection) -> None:
    """Answer calls until the other end is closed."""
    if sys.platform != "win32":
        os.setsid()  # Ctrl-C is for the parent, and what the function starts ends with this process
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        reward: RewardFunction = pickle.loads(connection.recv_bytes())
    except Exception as error:  # importing the user's module can raise anything
        traceback.print_exc()
        connection.send_bytes(pickle.dumps(("unreadable", None, _in_words(error))))
        return
    connection.send_bytes(pickle.dumps(("ready", None, "")))
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            return
        connection.send_bytes(_answer(reward, message))


def _answer(reward: RewardFunction, message: bytes) -> bytes:
    try:
        call = pickle.loads(message)
    except Exception as error:  # as for the function
        return pickle.dumps(("unreadable", None, _in_words(error)))
    try:
        with _modes():
            return pickle.dumps(("measured", reward.measure(call), ""))
    except BaseException as error:  # it goes on in the other process, SystemExit included
        text = "".join(traceback.format_exception(error))
        return pickle.dumps(("raised", _portable(error), text))


def _modes() -> AbstractContextManager[None]:
    """`user_code`, once the user's module has imported torch."""
    if "torch" not in sys.modules:
        return nullcontext()
    from comlrl_lightning.environment.torch_modes import user_code

    return user_code()


def _portable(error: BaseException) -> BaseException:
    """The exception if it survives the way, else one that says what it was."""
    try:
        if type(pickle.loads(pickle.dumps(error))) is type(error):
            return error
    except Exception:  # what pickling calls is code of the exception's class
        pass
    named = RuntimeError(_in_words(error))
    for note in vars(error).get("__notes__", ()):
        named.add_note(note)
    return named


def _in_words(error: BaseException) -> str:
    return "".join(traceback.TracebackException.from_exception(error).format_exception_only()).split("\n")[0]


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    _kill_group(os.getpid())
    os._exit(1)

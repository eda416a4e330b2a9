"""Calls between two processes of which one must not be trusted: values cross as plain data.

What crosses is JSON: numbers, text, containers of them, and numbers that stand for objects which
stay where they are (`Remote`). Plain values arrive as exact built-in types, so that nothing of the
sender decides how they compare; a `Remote` refuses to be compared. Imports the standard library
alone: `sandbox.py` uses it in an isolated interpreter.
"""

from __future__ import annotations

import builtins
import json
import operator
import socket
import struct
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from datetime import date, datetime
from decimal import Decimal
from fractions import Fraction
from typing import Any

_MESSAGE_BYTES = 64 << 20
_EXACT_INT = 1 << 53
_LENGTH = struct.Struct(">Q")


class Broken(BaseException):
    """The other side is gone, does not keep to the protocol, or was asked to judge itself.

    Not an `Exception`: a test that expects one must not take this for it.
    """


def _pairs(value: dict[Any, Any]) -> list[list[Any]]:
    return [[key, each] for key, each in dict.items(value)]


#: name -> type, its parts as plain data, and back; a subclass counts as the first that fits
_FORMS: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "Counter": (Counter, _pairs, lambda pairs: Counter(dict(pairs))),
    "OrderedDict": (OrderedDict, _pairs, OrderedDict),
    "dict": (dict, _pairs, dict),
    "tuple": (tuple, lambda value: list(tuple.__iter__(value)), tuple),
    "set": (set, lambda value: list(set.__iter__(value)), set),
    "frozenset": (frozenset, lambda value: list(frozenset.__iter__(value)), frozenset),
    "deque": (deque, lambda value: list(deque.__iter__(value)), deque),
    "bytes": (bytes, bytes.hex, bytes.fromhex),
    "bytearray": (bytearray, bytearray.hex, bytearray.fromhex),
    "complex": (complex, lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
    "range": (range, lambda value: [value.start, value.stop, value.step], lambda p: range(*p)),
    "Decimal": (Decimal, str, Decimal),
    "Fraction": (Fraction, str, Fraction),
    "datetime": (datetime, datetime.isoformat, datetime.fromisoformat),
    "date": (date, date.isoformat, date.fromisoformat),
}
_TYPES = {name: found for name, found in vars(builtins).items() if isinstance(found, type)}
_UPDATED_IN_PLACE = (list, dict, set, bytearray)


class Remote:
    """An object of the other side: called, read and iterated there, never compared."""

    def __init__(self, peer: Peer, number: int) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_number", number)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._peer.request("call", self, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._peer.request("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._peer.request("setattr", self, name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._peer.request("getitem", self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._peer.request("setitem", self, key, value)

    def __iter__(self) -> Any:
        return self._peer.request("iter", self)

    def __next__(self) -> Any:
        return self._peer.request("next", self)

    def __len__(self) -> int:
        return self._peer.request("len", self)

    def __bool__(self) -> bool:
        return self._peer.request("bool", self)

    def __int__(self) -> int:
        return self._peer.request("int", self)

    def __float__(self) -> float:
        return self._peer.request("float", self)

    def __str__(self) -> str:
        return self._peer.request("str", self)

    __repr__ = __str__

    # Its owner would decide whether a test passes. `in` goes by the items, which are compared here.
    def _refuse(self, other: object) -> Any:
        raise Broken("an object of the program's own class cannot be compared")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __hash__ = None  # type: ignore[assignment]


#: what a program's side does for a `Remote`
OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda function, *args, **kwargs: function(*args, **kwargs),
    "getitem": operator.getitem,
    "setitem": operator.setitem,
    **{f.__name__: f for f in (getattr, setattr, iter, next, len, bool, int, float, str)},
}


class Peer:
    """One end of a connection.

    operations: what the other side may ask for. None: it may only call the functions that it was
    given as arguments, and gets plain data back.
    """

    def __init__(
        self, channel: socket.socket, operations: Mapping[str, Callable[..., Any]] | None = None
    ) -> None:
        self._channel, self._operations = channel, operations
        self._lent: list[Any] = []

    def request(self, operation: str, *args: Any, **kwargs: Any) -> Any:
        """The result of an operation of the other side; raises what it raised, as a built-in."""
        named = {name: self._encode(value, lend=True) for name, value in kwargs.items()}
        self.send([operation, [self._encode(value, lend=True) for value in args], named])
        while (message := self.receive())[0] not in ("value", "error"):
            self._answer(message)
        if message[0] == "error":
            raise _error(*message[1:])
        _, value, states = message
        try:
            result = self._decode(value)
            if result is None and states:
                for given, state in zip((*args, *kwargs.values()), states, strict=True):
                    _update(given, self._decode(state))
        except (LookupError, TypeError, ValueError, ArithmeticError, RecursionError) as error:
            raise Broken(f"not plain data: {error}") from None
        return result

    def serve(self) -> None:
        """Answer requests until the other side is gone."""
        while True:
            try:
                message = self.receive()
            except Broken:
                return
            self._answer(message)

    def _answer(self, message: Any) -> None:
        serves_all = self._operations is not None
        try:
            operation, args, kwargs = message
            if not serves_all and (operation != "call" or not _is_lent(args[0])):
                raise Broken(f"the program asked for {operation!r}")
            given = [self._decode(value) for value in args]
            named = {name: self._decode(value) for name, value in kwargs.items()}
            result = (self._operations or OPERATIONS)[operation](*given, **named)
            states = None
            if operation == "call" and result is None:
                states = [
                    self._encode(value, lend=serves_all)
                    if type(value) in _UPDATED_IN_PLACE
                    else None
                    for value in (*given, *named.values())
                ]
            reply = ["value", self._encode(result, lend=serves_all), states]
        except Exception as error:
            reply = ["error", [base.__name__ for base in type(error).__mro__], str(error)[:1000]]
        self.send(reply)

    def _encode(self, value: Any, *, lend: bool = True) -> Any:
        """Plain data as JSON takes it; with `lend`, another object as a number to ask for it by."""
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return str.__str__(value)
        if isinstance(value, float):
            return float.__float__(value)
        if isinstance(value, int):
            return int(value) if abs(value) < _EXACT_INT else {"int": hex(value)}
        if isinstance(value, list):
            return [self._encode(each, lend=lend) for each in list.__iter__(value)]
        if isinstance(value, Remote) and value._peer is self:
            return {"lent": value._number}
        for name, (form, parts, _) in _FORMS.items():
            if isinstance(value, form):
                return {name: self._encode(parts(value), lend=lend)}
        if isinstance(value, type) and _TYPES.get(value.__name__) is value:
            return {"type": value.__name__}
        if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
            return self._encode(value.tolist(), lend=lend)
        if not lend or (self._operations is None and not callable(value)):
            raise TypeError(f"{type(value).__name__} is neither plain data nor a function")
        self._lent.append(value)
        return {"remote": len(self._lent) - 1}

    def _decode(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._decode(each) for each in value]
        if not isinstance(value, dict):
            return value
        ((name, parts),) = value.items()
        if name == "int":
            return int(parts, 16)
        if name == "remote":
            return Remote(self, int(parts))
        if name == "lent":
            return self._lent[operator.index(parts)]
        if name == "type":
            return _TYPES[parts]
        return _FORMS[name][2](self._decode(parts))

    def send(self, message: Any) -> None:
        """Send one JSON message."""
        body = json.dumps(message).encode()
        try:
            self._channel.sendall(_LENGTH.pack(len(body)) + body)
        except OSError as error:
            raise Broken(str(error)) from None

    def receive(self) -> Any:
        """The next JSON message; `Broken` if there is none."""
        try:
            (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
            if length > _MESSAGE_BYTES:
                raise Broken(f"a message of {length} bytes")
            message = json.loads(self._exactly(length))
        except (OSError, ValueError, RecursionError, MemoryError, struct.error) as error:
            raise Broken(str(error)) from None
        if not isinstance(message, list) or len(message) != 3:
            raise Broken("no message of three parts")
        return message

    def _exactly(self, length: int) -> bytes:
        parts = []
        while length and (part := self._channel.recv(min(length, 1 << 20))):
            parts.append(part)
            length -= len(part)
        return b"".join(parts)


def _update(given: Any, state: Any) -> None:
    """A function that returns None has worked in place: its caller's container follows."""
    if state is None or type(given) not in _UPDATED_IN_PLACE or type(state) is not type(given):
        return
    given.clear()
    (given.extend if isinstance(given, (list, bytearray)) else given.update)(state)


def _is_lent(value: Any) -> bool:
    return isinstance(value, dict) and list(value) == ["lent"]


class ProgramError(Exception):
    """An exception of the program that is no built-in."""


def _error(names: Any, text: Any) -> Exception:
    for name in names:
        found = _TYPES.get(name, object)
        if issubclass(found, Exception) and found is not Exception:
            try:
                return found(str(text))
            except TypeError:  # UnicodeDecodeError and the like take more
                continue
    return ProgramError(str(text))

"""A token-separable computation as a short list of scalar instructions.

`record_program` runs a function once on a handful of example tokens and writes down what it does to each of them.
Only operations that treat every token alike and apart have an instruction; anything else, be it a sum over
tokens, an index or a value read back to Python, is a `NotSeparableError`. So a program is a proof that the computation is
separable, and it can run where the token's logits are: on one token inside a kernel, or on a block of tokens
in torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

#: Instruction names and what each does to tensors; the position in this table is the code a kernel knows it by.
#: Truth values are 0 and 1.
OPERATIONS: dict[str, Callable[..., Tensor]] = {
    "add": lambda a, b, c: a + b,
    "sub": lambda a, b, c: a - b,
    "mul": lambda a, b, c: a * b,
    "div": lambda a, b, c: a / b,
    "neg": lambda a, b, c: -a,
    "abs": lambda a, b, c: a.abs(),
    "sign": lambda a, b, c: a.sign(),
    "exp": lambda a, b, c: a.exp(),
    "log": lambda a, b, c: a.log(),
    "sqrt": lambda a, b, c: a.sqrt(),
    "tanh": lambda a, b, c: a.tanh(),
    "sigmoid": lambda a, b, c: a.sigmoid(),
    "log1p": lambda a, b, c: a.log1p(),
    "expm1": lambda a, b, c: a.expm1(),
    "pow": lambda a, b, c: a.pow(b),
    "maximum": lambda a, b, c: torch.maximum(a, b),
    "minimum": lambda a, b, c: torch.minimum(a, b),
    "eq": lambda a, b, c: (a == b).float(),
    "ne": lambda a, b, c: (a != b).float(),
    "lt": lambda a, b, c: (a < b).float(),
    "le": lambda a, b, c: (a <= b).float(),
    "gt": lambda a, b, c: (a > b).float(),
    "ge": lambda a, b, c: (a >= b).float(),
    "and": lambda a, b, c: ((a != 0) & (b != 0)).float(),
    "or": lambda a, b, c: ((a != 0) | (b != 0)).float(),
    "not": lambda a, b, c: (a == 0).float(),
    "where": lambda a, b, c: torch.where(a != 0, b, c),
}
CODES = {name: code for code, name in enumerate(OPERATIONS)}


class NotSeparableError(Exception):
    """The computation does something that is not known to treat every token apart."""


@dataclass(frozen=True)
class Instruction:
    """`register[out] = operation(register[a], register[b], register[c])`; operands beyond the arity are 0."""

    operation: str
    out: int
    operands: tuple[int, int, int]


@dataclass(frozen=True)
class TokenProgram:
    """Registers hold the inputs first, then the constants, then results.

    inputs: names of the per-token inputs that are used; outputs: registers of the results
    Example, max(x, 2): inputs ("x",), constants (2.0,), one instruction maximum -> 2 of (0, 1), outputs (2,).
    """

    inputs: tuple[str, ...]
    constants: tuple[float, ...]
    instructions: tuple[Instruction, ...]
    outputs: tuple[int, ...]

    @property
    def num_registers(self) -> int:
        return len(self.inputs) + len(self.constants) + len(self.instructions)

    def run(self, values: Mapping[str, Tensor]) -> list[Tensor]:
        """The outputs [T] for inputs [T] float32 by name."""
        example = next(iter(values.values()))
        registers = [values[name] for name in self.inputs]
        registers += [example.new_full((), constant) for constant in self.constants]
        for instruction in self.instructions:
            a, b, c = (registers[i] for i in instruction.operands)
            registers.append(OPERATIONS[instruction.operation](a, b, c))
        return [registers[i].expand(example.shape) for i in self.outputs]


def record_program(
    function: Callable[[dict[str, Tensor]], Sequence[Tensor]], inputs: Mapping[str, Tensor]
) -> TokenProgram:
    """The program of `function`, which maps per-token inputs [T] by name to per-token outputs [T].

    T must be at least 2, so that a value of one token cannot be taken for a value of all. Recorded once, the
    program holds for tokens of any value: what would depend on a value in Python is not recorded but refused.
    """
    recorder = _Recorder(dict(inputs))
    with recorder:
        outputs = function(dict(inputs))
    return recorder.program(list(outputs))


# aten name -> instruction, for operations whose operands are the instruction's operands
_DIRECT = {
    "add": "add",
    "sub": "sub",
    "mul": "mul",
    "div": "div",
    "neg": "neg",
    "abs": "abs",
    "sign": "sign",
    "sgn": "sign",
    "exp": "exp",
    "log": "log",
    "sqrt": "sqrt",
    "tanh": "tanh",
    "sigmoid": "sigmoid",
    "log1p": "log1p",
    "expm1": "expm1",
    "pow": "pow",
    "maximum": "maximum",
    "minimum": "minimum",
    "clamp_min": "maximum",
    "clamp_max": "minimum",
    "eq": "eq",
    "ne": "ne",
    "lt": "lt",
    "le": "le",
    "gt": "gt",
    "ge": "ge",
    "bitwise_and": "and",
    "bitwise_or": "or",
    "bitwise_not": "not",
    "logical_and": "and",
    "logical_or": "or",
    "logical_not": "not",
    "where": "where",
}
_SAME_VALUES = {
    *("detach", "alias", "view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "expand", "clone"),
    *("slice", "split", "split_with_sizes", "lift_fresh", "cat", "contiguous", "to"),
}  # fmt: skip
#: Of their operand they take the shape alone.
_SHAPE_ONLY = {
    *("zeros_like", "ones_like", "full_like", "empty_like"),
    *("new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided"),
}
_EXACT_TYPES = (torch.float32, torch.float64, torch.bool, torch.int64, torch.int32)
_LOGICAL = ("bitwise_and", "bitwise_or", "bitwise_not")


class _Recorder(TorchDispatchMode):
    """Follows the values of tokens through every operation, also through those of the backward pass.

    A value belongs to a storage: views of all tokens share it, and a write in place replaces it for all of them.
    """

    def __init__(self, inputs: dict[str, Tensor]) -> None:
        super().__init__()
        self.names = tuple(inputs)
        self.tokens = next(iter(inputs.values())).numel()
        # Values: ("input", name), ("constant", number) or an index into `steps`.
        self.steps: list[tuple[str, tuple[Any, ...]]] = []
        self.value_of: dict[int, Any] = {
            _storage(tensor): ("input", name) for name, tensor in inputs.items()
        }
        self.alive: list[Tensor] = list(
            inputs.values()
        )  # a freed storage's address would be given out again

    @classmethod
    def _should_skip_dynamo(
        cls,
    ) -> bool:  # torch's default imports the whole compiler to be skipped by it
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        operands = _tensors((args, kwargs or {}))
        follows = any(map(self._follows, operands)) and name not in _SHAPE_ONLY
        # Before it runs: an operation in place overwrites its operand.
        value = self._value(name.removesuffix("_"), func, args, kwargs or {}) if follows else None
        result = func(*args, **(kwargs or {}))
        results = _tensors(result)
        self.alive += results
        if follows:
            for tensor in results:
                self._check_tokens(tensor, name)
                self.value_of[_storage(tensor)] = value
        elif name.endswith("_"):  # written with something that no token decides
            for tensor in results:
                self.value_of.pop(_storage(tensor), None)
        return result

    def _follows(self, tensor: Tensor) -> bool:
        return _storage(tensor) in self.value_of

    def _check_tokens(self, tensor: Tensor, name: str) -> None:
        if tensor.numel() != self.tokens or tensor.dtype not in _EXACT_TYPES:
            raise NotSeparableError(
                f"{name} gives {tensor.dtype} {list(tensor.shape)}, which is not one value per token"
            )

    def _value(self, name: str, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        arguments = _by_name(func, args, kwargs)
        if name in ("copy", "fill"):
            return self._converted(arguments[1][1], arguments[0][1].dtype, name)
        if name == "_to_copy":
            return self._converted(arguments[0][1], kwargs.get("dtype"), name)
        if name in _SAME_VALUES:
            return self._kept_whole(name, arguments)
        if name in _COMPOSED:
            return _COMPOSED[name](self, dict(arguments))
        if name not in _DIRECT:
            raise NotSeparableError(
                f"{name} is not among the operations known to treat every token apart"
            )
        if name in _LOGICAL and any(t.dtype != torch.bool for t in _tensors(args)):
            raise NotSeparableError(f"{name} of integers has no instruction")
        named = dict(arguments)
        if named.pop("rounding_mode", None) is not None:
            raise NotSeparableError(f"{name} with a rounding mode has no instruction")
        alpha = named.pop("alpha", 1)
        operands = [self._operand(value, name) for value in named.values()]
        if alpha != 1:
            operands[1] = self._step("mul", operands[1], ("constant", float(alpha)))
        return self._step(_DIRECT[name], *operands)

    def _converted(self, source: Any, dtype: torch.dtype | None, name: str) -> Any:
        value = self._operand(source, name)
        if dtype == torch.bool:
            return self._step("ne", value, ("constant", 0.0))
        loses = isinstance(source, Tensor) and source.is_floating_point()
        if loses and dtype is not None and not dtype.is_floating_point:
            raise NotSeparableError(f"{name} to {dtype} has no instruction")
        return value

    def _kept_whole(self, name: str, arguments: list[tuple[str, Any]]) -> Any:
        """The value of the one operand that an operation passes on as it is."""
        parts = [t for t in _tensors([value for _, value in arguments]) if t.numel()]
        if len(parts) != 1:
            raise NotSeparableError(f"{name} joins {len(parts)} tensors of tokens")
        if parts[0].numel() != self.tokens:
            raise NotSeparableError(f"{name} of {parts[0].numel()} of {self.tokens} tokens")
        return self._operand(parts[0], name)

    def _operand(self, value: Any, name: str) -> Any:
        if not isinstance(value, Tensor):
            return ("constant", float(value))
        if self._follows(value):
            if value.numel() != self.tokens:
                raise NotSeparableError(f"{name} reads {value.numel()} of {self.tokens} tokens")
            return self.value_of[_storage(value)]
        flat = value.detach().reshape(-1)
        if flat.numel() == 0 or flat.dtype not in _EXACT_TYPES or not bool((flat == flat[0]).all()):
            raise NotSeparableError(f"{name} uses a tensor that is not one of the inputs")
        return ("constant", float(flat[0]))

    def _step(self, operation: str, *operands: Any) -> int:
        self.steps.append((operation, operands))
        return len(self.steps) - 1

    def program(self, outputs: list[Tensor]) -> TokenProgram:
        """The instructions that the outputs depend on, numbered anew."""
        wanted = [self._operand(output, "the result") for output in outputs]
        needed: set[Any] = set()
        pending = list(wanted)
        while pending:
            value = pending.pop()
            if value not in needed:
                needed.add(value)
                pending += self.steps[value][1] if isinstance(value, int) else ()
        inputs = tuple(name for name in self.names if ("input", name) in needed)
        constants = sorted({v[1] for v in needed if isinstance(v, tuple) and v[0] == "constant"})
        constants = constants or [
            0.0
        ]  # operands that an instruction does not use point at register 0
        register: dict[Any, int] = {("input", name): i for i, name in enumerate(inputs)}
        register |= {("constant", c): len(inputs) + i for i, c in enumerate(constants)}
        instructions = []
        for step in sorted(value for value in needed if isinstance(value, int)):
            operation, operands = self.steps[step]
            register[step] = len(register)
            numbers = [register[operand] for operand in operands]
            a, b, c = (*numbers, 0, 0, 0)[:3]
            instructions.append(Instruction(operation, register[step], (a, b, c)))
        return TokenProgram(
            inputs, tuple(constants), tuple(instructions), tuple(register[v] for v in wanted)
        )


def _clamp(recorder: _Recorder, named: dict[str, Any]) -> Any:
    value = recorder._operand(named["self"], "clamp")
    for bound, operation in (("min", "maximum"), ("max", "minimum")):
        if named.get(bound) is not None:
            value = recorder._step(operation, value, recorder._operand(named[bound], "clamp"))
    return value


def _masked_fill(recorder: _Recorder, named: dict[str, Any]) -> Any:
    values = [recorder._operand(named[key], "masked_fill") for key in ("mask", "value", "self")]
    return recorder._step("where", *values)


def _reversed_sub(recorder: _Recorder, named: dict[str, Any]) -> Any:
    values = [recorder._operand(named[key], "rsub") for key in ("other", "self")]
    return recorder._step("sub", *values)


def _reciprocal(recorder: _Recorder, named: dict[str, Any]) -> Any:
    value = recorder._operand(named["self"], "reciprocal")
    return recorder._step("div", ("constant", 1.0), value)


def _square(recorder: _Recorder, named: dict[str, Any]) -> Any:
    value = recorder._operand(named["self"], "square")
    return recorder._step("mul", value, value)


def _sigmoid_backward(recorder: _Recorder, named: dict[str, Any]) -> Any:
    grad, output = (recorder._operand(v, "sigmoid_backward") for v in named.values())
    rest = recorder._step("sub", ("constant", 1.0), output)
    return recorder._step("mul", grad, recorder._step("mul", output, rest))


def _tanh_backward(recorder: _Recorder, named: dict[str, Any]) -> Any:
    grad, output = (recorder._operand(v, "tanh_backward") for v in named.values())
    squared = recorder._step("mul", output, output)
    return recorder._step("mul", grad, recorder._step("sub", ("constant", 1.0), squared))


_COMPOSED: dict[str, Callable[[_Recorder, dict[str, Any]], Any]] = {
    "clamp": _clamp,
    "masked_fill": _masked_fill,
    "rsub": _reversed_sub,
    "reciprocal": _reciprocal,
    "square": _square,
    "sigmoid_backward": _sigmoid_backward,
    "tanh_backward": _tanh_backward,
}


def _by_name(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    names = [argument.name for argument in func._schema.arguments]
    return [*zip(names, args, strict=False), *kwargs.items()]


def _tensors(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, dict):
        return _tensors(list(values.values()))
    if isinstance(values, (list, tuple)):
        return [tensor for value in values for tensor in _tensors(value)]
    return []


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata

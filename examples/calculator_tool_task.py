"""Arithmetic with a calculator, for any chat model that calls tools as `<tool_call>{...}</tool_call>`.

    megatron-tis train --task-path examples/calculator_tool_task.py:CalculatorTask --hf-checkpoint /models/qwen3-0.6b \
      --preserve-all-thinking --max-turns 6 --max-context-length 8192 --max-response-length 1024

On a cluster of 5 nodes of 8 GPUs, 4 for training and 1 for engines; every node needs this file and
the model under the same path:

    megatron-tis train --task-path examples/calculator_tool_task.py:CalculatorTask --hf-checkpoint /models/qwen3-8b \
      --preserve-all-thinking --max-turns 6 --max-context-length 16384 --max-response-length 4096 --address auto \
      --num-nodes 4 --num-gpus-per-node 8 --tensor-model-parallel-size 4 --rollout-engine vllm --num-rollout-engines 8 \
      --max-tokens-per-gpu auto --train-dtype bfloat16 --rollout-dtype bfloat16 --rollout-batch-size 256
"""

from __future__ import annotations

import ast
import operator
import random
from typing import Any

from plugin.environments.environment_protocol import Ending, Message
from plugin.environments.tool_environment import ToolEnvironment

CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Value of an expression of integers with + - * and parentheses.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}

_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def calculate(expression: str) -> int:
    """The value; anything but integers, + - * and parentheses is a ValueError that the model gets to read."""
    if len(expression) > 200:
        raise ValueError("the expression is longer than 200 characters")
    return _value(ast.parse(expression, mode="eval").body)


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError(f"{ast.unparse(node)} is not allowed; use integers, + - * and parentheses")


class CalculatorTask:
    """Expressions of three numbers, drawn from the seed."""

    tools = (CALCULATOR,)

    def __init__(self, config: Any, tokenizer: Any) -> None:
        self.stop_token_ids = (int(tokenizer.eos_token_id),)
        self._seed = config.seed

    def messages(self, index: int) -> list[Message]:
        """The question."""
        question = f"What is {self._expression(index)}? Answer with the number alone."
        return [{"role": "user", "content": question}]

    def environment(self, index: int, seed: int) -> ToolEnvironment:
        """The calculator; an answer is worth 1 if it is the number, and nothing if it was cut off."""
        wanted = str(calculate(self._expression(index)))

        def score(answer: str, ending: Ending) -> float:
            return float(ending == "done" and answer.strip() == wanted)

        return ToolEnvironment({"calculate": calculate}, score)

    def _expression(self, index: int) -> str:
        draw = random.Random(f"{self._seed}/{index}")
        a, b, c = (draw.randint(100, 9999) for _ in range(3))
        return f"{a} {draw.choice('+-*')} {b} {draw.choice('+-')} {c}"

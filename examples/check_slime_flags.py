"""Check the flags of a slime or miles job before it takes a GPU: load the hooks, call them as slime does.

    python examples/check_slime_flags.py --use-tis --tis-clip 2.0 \\
        --custom-tis-function-path plugin.ppo_utils.off_policy_is_function --advantage-estimator cispo

Flags unrelated to the loss are ignored, unless they look like a misspelled one that is related. The
exit code is 0 if the first step would run.
"""

from __future__ import annotations

import argparse
import difflib
import sys

import torch

from plugin.config import LossConfig
from plugin.config.other_frameworks import SLIME_LOSS_FLAGS, loss_config_of, slime_option
from plugin.errors import ConfigError, MegatronTisError
from plugin.loss import policy_loss_function

#: Flags of slime, miles and Megatron that resemble one of the loss without having to do with it.
LOOK_ALIKES = {
    *("--loss-mask-type", "--lora-type"),
    *("--rollout-stop", "--use-rollout-indexer-replay"),
    *("--custom-generate-function-path", "--custom-rollout-log-function-path"),
}


def read_flags(argv: list[str]) -> argparse.Namespace:
    """slime's namespace as far as the loss can see it."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    LossConfig.add_arguments(parser)
    ours = {option for action in parser._actions for option in action.option_strings}
    for name, flag in SLIME_LOSS_FLAGS.items():
        if (option := slime_option(name)) in ours:
            continue
        if isinstance(flag.default, bool):
            parser.add_argument(option, dest=name, action="store_const", const=not flag.default)
        else:
            parser.add_argument(option)
    parser.add_argument("--context-parallel-size", type=int, default=1)
    # Values of slime's own, which our flag of the same name does not know.
    parser.set_defaults(advantage_estimator="grpo")
    known, others = parser.parse_known_args(argv)
    options = [option for action in parser._actions for option in action.option_strings]
    for given in (word.split("=")[0] for word in others if word.startswith("--")):
        near = difflib.get_close_matches(given.replace("_", "-"), options, n=1, cutoff=0.8)
        if near and given not in LOOK_ALIKES:
            raise ConfigError(f"{given} is not a flag of the loss; did you mean {near[0]}?")
    return argparse.Namespace(**{name: _typed(value) for name, value in vars(known).items()})


def refuse_what_slime_refuses(args: argparse.Namespace) -> None:
    """slime and vime check this before a job starts, so their batches never reach our loss."""
    if args.use_score_centering and args.loss_type not in (None, "policy_loss"):
        raise ConfigError(
            f"--use-score-centering with --loss-type {args.loss_type}: slime and vime center their "
            "own loss only; drop --loss-type, or train with megatron-tis and --score-centering-topk"
        )


def _typed(value: object) -> object:
    """Numbers as numbers, as slime's own parser gives them."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def one_call(args: argparse.Namespace) -> dict[str, float]:
    """The loss of a small batch with the keys that slime's batches have."""
    torch.manual_seed(0)
    lengths, responses = [6, 5], [4, 2]
    batch = {
        "unconcat_tokens": [torch.randint(0, 8, (n,)) for n in lengths],
        "total_lengths": lengths,
        "response_lengths": responses,
        "loss_masks": [torch.ones(n) for n in responses],
        "advantages": [torch.randn(n) for n in responses],
        "log_probs": [torch.full((n,), -2.0) for n in responses],
        "rollout_log_probs": [torch.full((n,), -2.1) for n in responses],
        "ref_log_probs": [torch.full((n,), -2.2) for n in responses],
        "rollout_topk_token_ids": [torch.arange(3).int().expand(n, 3) for n in responses],
        "rollout_topk_log_probs": [torch.full((n, 3), -2.0) for n in responses],
    }
    logits = torch.randn(1, sum(lengths), 8, requires_grad=True)
    loss, metrics = policy_loss_function(args, batch, logits, torch.sum)
    loss.backward()
    return {name: float(value) for name, value in metrics.items()}


def main(argv: list[str]) -> int:
    try:
        args = read_flags(argv)
        refuse_what_slime_refuses(args)
        config = loss_config_of(args)
        metrics = one_call(args)
    except MegatronTisError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    hooks = ", ".join(config.hook_names()) if config.use_tis else "none"
    print(f"policy loss {config.policy_loss}; corrections: {hooks}; loss {metrics['loss']:.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

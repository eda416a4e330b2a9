#!/usr/bin/env bash
# Launches a slime job with our loss and corrections. With CHECK_ONLY=1 it stops after checking the flags, which needs
# neither slime nor a GPU:
#
#   CHECK_ONLY=1 bash examples/slime_launch.sh
#
# On a cluster, inside slime's container and checkout (Ray is running, megatron-tis is installed on every node):
#
#   SLIME=/root/slime MODEL_ARGS_FILE=/root/slime/scripts/models/qwen3-4B.sh bash examples/slime_launch.sh
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
python="${PYTHON:-python}"

# The whole loss is ours: it passes the current policy's log-probs to the correction, which slime's own loss does not.
LOSS_ARGS=(
  --loss-type custom_loss
  --custom-loss-function-path plugin.loss.policy_loss_function
  --advantage-estimator grpo
  --eps-clip 0.2
  --eps-clip-high 0.28
  --use-tis
  --custom-tis-function-path plugin.ppo_utils.vanilla_tis_function
  --tis-clip 2.0
)

"$python" "$here/check_slime_flags.py" "${LOSS_ARGS[@]}"
if [[ "${CHECK_ONLY:-0}" == 1 ]]; then exit 0; fi

# shellcheck disable=SC1090
source "${MODEL_ARGS_FILE:?the file that defines MODEL_ARGS, e.g. scripts/models/qwen3-4B.sh of slime}"
cd "${SLIME:?the checkout of slime}"
ray job submit --address="${RAY_ADDRESS:-http://127.0.0.1:8265}" -- python3 train.py \
  --actor-num-nodes "${NODES:-1}" --actor-num-gpus-per-node 8 --colocate \
  "${MODEL_ARGS[@]}" "${LOSS_ARGS[@]}" "$@"

"""The subcommands of `megatron-tis`, one module each."""

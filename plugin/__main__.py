"""`python -m plugin` is `megatron-tis`."""

from plugin.cli import main

if __name__ == "__main__":
    raise SystemExit(main())

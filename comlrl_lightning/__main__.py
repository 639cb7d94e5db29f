"""``python -m comlrl_lightning`` is the command line ``comlrl-lightning``."""

from comlrl_lightning.cli import main

if __name__ == "__main__":
    main()

"""`python -m skyrl_engine` is `skyrl-engine`."""

import sys

from skyrl_engine.cli.app import main

if __name__ == "__main__":
    sys.exit(main())

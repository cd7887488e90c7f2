"""The `supervisor` command: see `cli` for what it can do."""

import sys

from supervisor.cli import main

if __name__ == "__main__":
    sys.exit(main())

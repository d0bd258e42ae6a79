"""`python -m attngen` is the command `attngen`."""

import sys

from attngen.cli import main

if __name__ == "__main__":
    sys.exit(main())

"""`python -m ssd_serve`: the same as the command `ssd`."""

import sys

from ssd_serve.app.cli.main import main

sys.exit(main())

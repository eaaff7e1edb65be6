"""``python -m cluster.lab.bench NAME``: runs a bench without the CLI, on machines with only the engine installed."""

import sys

from cluster.errors import SightlineError
from cluster.lab.bench.harness import main

try:
    raise SystemExit(main())
except SightlineError as error:
    print(f"error: {error}", file=sys.stderr)
    raise SystemExit(error.exit_code) from None
except ModuleNotFoundError as error:
    print(f"error: this needs {error.name}, which is not installed", file=sys.stderr)
    raise SystemExit(2) from None
except KeyboardInterrupt:
    raise SystemExit(130) from None

"""``python -m cluster.bench NAME``: a bench without the CLI, for machines that hold only the engine."""

from cluster.bench.harness import main

raise SystemExit(main())

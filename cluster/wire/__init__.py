"""Everything that crosses a process border: conversions, servers and clients over ``protos/sightline/v1``."""

import os

# Core writes to standard error whatever goes wrong with a connection or a port; we report it ourselves, in one
# sentence. Only works before grpc is imported; set the variable to INFO or DEBUG to see it all.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

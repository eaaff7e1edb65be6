"""Everything that crosses process boundaries: conversions, servers and clients for ``protos/sightline/v1``."""

import os

# gRPC's core logs every connection and port error to standard error; we report those ourselves, in one sentence.
# Must be set before grpc is imported; set it to INFO or DEBUG to see them.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

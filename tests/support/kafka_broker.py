"""librdkafka's mock cluster as a process: a broker of Kafka's protocol on a real port, in memory.

It obeys ``down`` and ``up`` on its standard input: connections are cut and refused, what it holds stays. It is the
protocol as Kafka's most used client library sees it, and no more: no replication, no disk, no access control.
"""

import ctypes
import sys
from pathlib import Path

import confluent_kafka

PRODUCER = 0


def main() -> None:
    """Print the address, then obey."""
    package = Path(confluent_kafka.__file__).parent
    [path] = package.with_name("confluent_kafka.libs").glob("librdkafka-*.so*")
    library = ctypes.CDLL(str(path))
    for name in ("rd_kafka_conf_new", "rd_kafka_new", "rd_kafka_mock_cluster_new"):
        getattr(library, name).restype = ctypes.c_void_p
    library.rd_kafka_mock_cluster_bootstraps.restype = ctypes.c_char_p
    reason = ctypes.create_string_buffer(512)
    settings = ctypes.c_void_p(library.rd_kafka_conf_new())
    handle = ctypes.c_void_p(library.rd_kafka_new(PRODUCER, settings, reason, ctypes.c_size_t(512)))
    cluster = ctypes.c_void_p(library.rd_kafka_mock_cluster_new(handle, 1))
    print(library.rd_kafka_mock_cluster_bootstraps(cluster).decode(), flush=True)
    for line in sys.stdin:
        getattr(library, f"rd_kafka_mock_broker_set_{line.strip()}")(cluster, ctypes.c_int32(-1))
        print(line.strip(), flush=True)


if __name__ == "__main__":
    main()

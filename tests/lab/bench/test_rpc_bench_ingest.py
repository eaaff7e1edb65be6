"""The ingest bench at its smallest: real processes, every packet accounted for, no process left behind."""

import argparse
import subprocess
import sys

import psutil

from cluster.lab.bench import ingest


def test_it_measures_and_leaves_nothing_running():
    parser = argparse.ArgumentParser()
    ingest.add_arguments(parser)
    result = ingest.run(parser.parse_args(["--packets", "64", "--size", "512"]))
    assert {(row["via"], row["cameras"], row["packets_per_message"]) for row in result.rows} == {
        *(("gateway", 1, batch) for batch in ingest.BATCHES),
        ("gateway", ingest.MANY, 1),
        *(("decoder directly", 1, batch) for batch in ingest.BATCHES),
    }
    assert all(row["packets"] == 64 for row in result.rows)
    assert all(figure > 0 for figure in result.figures.values())
    commands = [" ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)]
    assert not [command for command in commands if "push_processes" in command]


def test_processes_of_the_bench_but_the_replica_are_without_torch() -> None:
    """Their memory is a figure: the gateway's was 443 MB in place of 92."""
    code = "import cluster.lab.bench.push_processes, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

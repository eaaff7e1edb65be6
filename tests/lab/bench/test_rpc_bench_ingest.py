"""The ingest bench at its smallest: real processes, every packet accounted for, no process left behind."""

import argparse

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

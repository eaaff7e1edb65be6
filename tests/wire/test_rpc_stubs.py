"""The committed stubs are what the .proto files generate."""

import importlib
import re
from importlib.metadata import version
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from grpc_tools import protoc

PROTOS = Path(__file__).parents[2] / "protos"
NAMES = sorted(path.stem for path in (PROTOS / "sightline/v1").glob("*.proto"))
REGENERATE = (
    "regenerate: python -m grpc_tools.protoc -I protos --python_out=protos --pyi_out=protos --grpc_python_out=protos "
    "protos/sightline/v1/*.proto"
)


def run_protoc(*options):
    files = [f"sightline/v1/{name}.proto" for name in NAMES]
    assert protoc.main(["protoc", "-I", str(PROTOS), *options, *files]) == 0


def strip(proto):
    """Names in JSON are in a descriptor set only."""
    plain = FileDescriptorProto.FromString(proto.SerializeToString())
    for message in plain.message_type:
        for field in message.field:
            field.ClearField("json_name")
    return plain


def test_descriptors(tmp_path):
    run_protoc(f"--descriptor_set_out={tmp_path / 'set'}")
    found = {proto.name: strip(proto) for proto in FileDescriptorSet.FromString((tmp_path / "set").read_bytes()).file}
    for name in NAMES:
        module = importlib.import_module(f"sightline.v1.{name}_pb2")
        committed = FileDescriptorProto.FromString(module.DESCRIPTOR.serialized_pb)
        assert strip(committed) == found[f"sightline/v1/{name}.proto"], REGENERATE


@pytest.mark.parametrize("suffix", ["_pb2.py", "_pb2.pyi", "_pb2_grpc.py"])
def test_files(tmp_path, suffix):
    """Text for text where the generator is the one that was used; else without what names its version."""
    run_protoc(*[f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")])
    used = re.search(r"GENERATED_VERSION = '(.+)'", (PROTOS / f"sightline/v1/{NAMES[0]}_pb2_grpc.py").read_text())
    assert used is not None
    for name in NAMES:
        mine = (PROTOS / f"sightline/v1/{name}{suffix}").read_text()
        new = (tmp_path / f"sightline/v1/{name}{suffix}").read_text()
        if version("grpcio-tools") == used.group(1):
            assert mine == new, REGENERATE
        else:
            assert set(re.findall(r"[A-Za-z]\w+", new)) >= set(re.findall(r"class (\w+)", mine)), REGENERATE

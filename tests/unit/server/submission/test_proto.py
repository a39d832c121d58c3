"""Compare our protobuf messages with the installed SDK's, field by field."""

import subprocess
import sys

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, EnumDescriptorProto
from tinker.proto import tinker_public_pb2

from skyrl_tx.server.submission import wire_pb2

NOT_ON_THE_WIRE = {"SamplingParams", "StopStrings", "StopTokens"}
"""Messages in the SDK's schema that we do not need, because every SDK version samples in JSON."""


def get_fields(message: object) -> dict[int, tuple[str, int, int]]:
    described = DescriptorProto()
    message.CopyToProto(described)  # pyright: ignore
    return {field.number: (field.name, field.type, field.label) for field in described.field}


@pytest.mark.parametrize("name", sorted(set(tinker_public_pb2.DESCRIPTOR.message_types_by_name) - NOT_ON_THE_WIRE))
def test_messages_have_the_fields_of_the_sdk(name: str) -> None:
    theirs = tinker_public_pb2.DESCRIPTOR.message_types_by_name[name]
    ours = wire_pb2.DESCRIPTOR.message_types_by_name.get(name)
    if ours is None:
        candidates = [get_fields(message) for message in wire_pb2.DESCRIPTOR.message_types_by_name.values()]
        assert get_fields(theirs) in candidates, f"{name} has no counterpart"
    else:
        assert get_fields(ours) == get_fields(theirs)


@pytest.mark.parametrize("name", sorted(tinker_public_pb2.DESCRIPTOR.enum_types_by_name))
def test_enums_have_the_values_of_the_sdk(name: str) -> None:
    theirs, ours = EnumDescriptorProto(), EnumDescriptorProto()
    tinker_public_pb2.DESCRIPTOR.enum_types_by_name[name].CopyToProto(theirs)
    wire_pb2.DESCRIPTOR.enum_types_by_name[name].CopyToProto(ours)
    assert {value.name: value.number for value in ours.value} == {value.name: value.number for value in theirs.value}


def test_importing_messages_emits_no_warning() -> None:
    subprocess.run([sys.executable, "-W", "error", "-c", "import skyrl_tx.server.submission.wire_pb2"], check=True)

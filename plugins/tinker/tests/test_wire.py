"""Field numbers are those of the SDK."""

import os
import subprocess
import sys

from skyrl_engine_tinker.wire import MESSAGES

SDK = os.environ.get("TINKER_SDK")

PROBE = """
from google.protobuf import descriptor_pb2
from tinker.proto import tinker_public_pb2
file = descriptor_pb2.FileDescriptorProto()
tinker_public_pb2.DESCRIPTOR.CopyToProto(file)
for message in file.message_type:
    for field in message.field:
        print(message.name, field.name, field.number)
"""


def test_field_numbers_are_those_of_the_sdk():
    environment = os.environ if SDK is None else {**os.environ, "PYTHONPATH": SDK}
    process = subprocess.run([sys.executable, "-c", PROBE], env=environment, capture_output=True, text=True, timeout=60, check=True)
    sdk_numbers = {tuple(line.split()[:2]): int(line.split()[2]) for line in process.stdout.splitlines()}
    own_numbers = {(message, field): number for message, fields in MESSAGES.items() for field, (number, _) in fields.items()}
    assert len(own_numbers) > 25
    # Python names of messages may change between releases; numbers may not
    known = {place: number for place, number in own_numbers.items() if place in sdk_numbers}
    assert len(known) >= 0.8 * len(own_numbers)
    assert known == {place: sdk_numbers[place] for place in known}

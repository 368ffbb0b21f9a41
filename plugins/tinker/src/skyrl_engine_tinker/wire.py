"""Messages of the Tinker API's protobuf package, written down as one table; field numbers are the protocol, names are ours to read.

Only what this server reads or writes stands here; unknown fields are passed over, as protobuf does. A test holds the numbers and types
against an installed SDK.
"""

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory  # type: ignore[import-untyped] # no stubs come with it

PACKAGE = "skyrl_engine_tinker.wire"
FLOAT32, INT64, INT32, BFLOAT16 = 1, 2, 3, 4
"""Values of `dtype`."""
STOP, LENGTH = 0, 1
"""Values of `stop_reason`."""

# name: (number, type); "*" repeats, "?" knows absence, "map" has text keys, and what is no scalar is a message of this table.
# Enumerations are int32 here: the same bytes.
MESSAGES: dict[str, dict[str, tuple[int, str]]] = {
    "EncodedTextChunk": {"tokens": (1, "bytes")},
    "Opaque": {},
    "Chunk": {"encoded_text": (1, "?EncodedTextChunk"), "image": (2, "?Opaque"), "dmel": (3, "?Opaque")},
    "SparseCsr": {"values": (1, "bytes"), "crow_indices": (2, "bytes"), "col_indices": (3, "bytes")},
    "Tensor": {"dense": (1, "?bytes"), "sparse_csr": (2, "?SparseCsr"), "dtype": (3, "int32"), "shape": (4, "*int64")},
    "Datum": {"model_input": (1, "*Chunk"), "loss_fn_inputs": (2, "map Tensor")},
    "LossConfigValue": {"number": (1, "?double"), "text": (2, "?string")},
    "ForwardBackwardRequest": {
        "model_id": (1, "string"),
        "seq_id": (2, "int32"),
        "data": (3, "*Datum"),
        "loss_fn": (4, "string"),
        "loss_fn_config": (5, "map double"),
        "forward_only": (6, "bool"),
        "loss_fn_config_v2": (7, "map LossConfigValue"),
    },
    "BatchedTensor": {"data": (1, "bytes"), "offsets": (2, "bytes"), "dtype": (3, "int32"), "trailing_shape": (4, "*int64")},
    "ArrayRecord": {"type_tag": (1, "string"), "fields": (2, "map BatchedTensor"), "num_datums": (3, "int64")},
    "ForwardBackwardOutput": {
        "loss_fn_output_type": (1, "string"),
        "loss_fn_outputs": (2, "*ArrayRecord"),
        "metrics": (3, "map double"),
    },
    "TopkLogprobs": {"token_ids": (1, "bytes"), "logprobs": (2, "bytes"), "k": (3, "uint32"), "length": (4, "uint32")},
    "SampledSequence": {
        "stop_reason": (1, "int32"),
        "tokens": (2, "bytes"),
        "logprobs": (3, "?bytes"),
        "topk_sampled_logprobs": (4, "?TopkLogprobs"),
    },
    "SampleResponse": {
        "sequences": (1, "*SampledSequence"),
        "prompt_logprobs": (2, "?bytes"),
        "topk_prompt_logprobs": (3, "?TopkLogprobs"),
    },
}

_Field = descriptor_pb2.FieldDescriptorProto


def _build_messages() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="skyrl_engine_tinker/wire.proto", package=PACKAGE, syntax="proto3")
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, (number, kind) in fields.items():
            if kind.startswith("map "):
                entry = message.nested_type.add(name="".join(part.title() for part in field.split("_")) + "Entry")
                entry.options.map_entry = True
                _add(entry, "key", 1, "string")
                _add(entry, "value", 2, kind.removeprefix("map "))
                message.field.add(
                    name=field,
                    number=number,
                    label=_Field.LABEL_REPEATED,
                    type=_Field.TYPE_MESSAGE,
                    type_name=f".{PACKAGE}.{name}.{entry.name}",
                )
            else:
                _add(message, field, number, kind)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}")) for name in MESSAGES}


def _add(message: Any, name: str, number: int, kind: str) -> None:
    bare = kind.lstrip("*?")
    field = message.field.add(name=name, number=number)
    field.label = _Field.LABEL_REPEATED if kind.startswith("*") else _Field.LABEL_OPTIONAL
    if bare in MESSAGES:
        field.type, field.type_name = _Field.TYPE_MESSAGE, f".{PACKAGE}.{bare}"
        return
    field.type = getattr(_Field, f"TYPE_{bare.upper()}")
    if kind.startswith("?"):
        # presence of a scalar in proto3
        field.proto3_optional = True
        field.oneof_index = len(message.oneof_decl)
        message.oneof_decl.add(name=f"_{name}")


CLASSES = _build_messages()
"""Message classes by name."""

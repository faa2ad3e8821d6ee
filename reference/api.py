"""docs/api.md: the services, methods, messages and fields of the public protos, with their comments."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)

from reference.markdown import cell, plain, table

PROTOS = Path(__file__).parents[1] / "protos"
FILES = ("paged/v1/inference.proto", "paged/v1/control.proto")
HEAD = """# API

<!-- Made from protos/ by `make docs`; do not edit. -->

What a scheduler serves, package `paged.v1`: `protos/paged/v1/inference.proto` and `control.proto`. On the same port
are the standard health service (`grpc.health.v1`), reflection, and `vllm.grpc.engine.VllmEngine` for gateways
([gateway.md](gateway.md)). Who may call what is in [security.md](security.md#tokens). A field that is *optional* tells
whether it was set; its comment says what it means if it was not.
"""
_Path = tuple[int, ...]
_Type = FieldDescriptorProto.Type


def api_page() -> str:
    """The page. Raises CalledProcessError where the protos do not compile."""
    return "\n".join([HEAD, *(part for file in _files() for part in _File(file).parts())])


def _files() -> list[FileDescriptorProto]:
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "protos.bin"
        flags = (f"-I{PROTOS}", f"--descriptor_set_out={out}", "--include_source_info")
        subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *flags, *FILES], check=True)
        files = FileDescriptorSet.FromString(out.read_bytes()).file
    return sorted(files, key=lambda file: FILES.index(file.name))


class _File:
    """Of a proto file. Places in it are paths of field numbers and indices, as descriptor.proto has them."""

    def __init__(self, file: FileDescriptorProto) -> None:
        self._file = file
        self._comments = {tuple(place.path): place.leading_comments for place in file.source_code_info.location}

    def parts(self) -> Iterator[str]:
        for i, service in enumerate(self._file.service):
            yield from self._service(service, (FileDescriptorProto.SERVICE_FIELD_NUMBER, i))
        for i, message in enumerate(self._file.message_type):
            yield from self._message(message, message.name, (FileDescriptorProto.MESSAGE_TYPE_FIELD_NUMBER, i))
        for i, enum in enumerate(self._file.enum_type):
            yield from self._enum(enum, enum.name, (FileDescriptorProto.ENUM_TYPE_FIELD_NUMBER, i))

    def _service(self, service: ServiceDescriptorProto, at: _Path) -> Iterator[str]:
        yield f"## {service.name}\n"
        yield from self._comment(at)
        for i, method in enumerate(service.method):
            streams = "a stream of " if method.server_streaming else ""
            yield f"### {method.name}\n"
            yield f"{_linked(method.input_type)} → {streams}{_linked(method.output_type)}\n"
            yield from self._comment((*at, ServiceDescriptorProto.METHOD_FIELD_NUMBER, i))

    def _message(self, message: DescriptorProto, name: str, at: _Path) -> Iterator[str]:
        yield f"### {name}\n"
        yield from self._comment(at)
        rows = [
            [f"`{field.name}`", _kind(field, message), self._cell((*at, DescriptorProto.FIELD_FIELD_NUMBER, i))]
            for i, field in enumerate(message.field)
        ]
        if rows:
            yield table(["field", "type", "meaning"], rows) + "\n"
        for i, inner in enumerate(message.nested_type):
            if not inner.options.map_entry:
                path = (*at, DescriptorProto.NESTED_TYPE_FIELD_NUMBER, i)
                yield from self._message(inner, f"{name}.{inner.name}", path)
        for i, enum in enumerate(message.enum_type):
            path = (*at, DescriptorProto.ENUM_TYPE_FIELD_NUMBER, i)
            yield from self._enum(enum, f"{name}.{enum.name}", path)

    def _enum(self, enum: EnumDescriptorProto, name: str, at: _Path) -> Iterator[str]:
        yield f"### {name}\n"
        yield from self._comment(at)
        rows = [
            [f"`{value.name}`", str(value.number), self._cell((*at, EnumDescriptorProto.VALUE_FIELD_NUMBER, i))]
            for i, value in enumerate(enum.value)
        ]
        yield table(["value", "number", "meaning"], rows) + "\n"

    def _comment(self, at: _Path) -> Iterator[str]:
        if text := self._text(at):
            yield plain(text) + "\n"

    def _cell(self, at: _Path) -> str:
        return cell(self._text(at))

    def _text(self, at: _Path) -> str:
        return "\n".join(line.strip() for line in self._comments.get(at, "").strip().splitlines())


def _kind(field: FieldDescriptorProto, message: DescriptorProto) -> str:
    """Its type, with how often it comes."""
    if field.type in (_Type.TYPE_MESSAGE, _Type.TYPE_ENUM):
        entry = next((m for m in message.nested_type if field.type_name.endswith(f".{message.name}.{m.name}")), None)
        if entry is not None and entry.options.map_entry:
            key, value = (_kind(part, entry) for part in entry.field)
            return f"map of {key} to {value}"
        kind = _linked(field.type_name)
    else:
        kind = _Type.Name(field.type).removeprefix("TYPE_").lower()
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"list of {kind}"
    if field.proto3_optional:
        return f"optional {kind}"
    if field.HasField("oneof_index"):
        return f"{kind}, one of `{message.oneof_decl[field.oneof_index].name}`"
    return kind


def _linked(type_name: str) -> str:
    name = type_name.removeprefix(".paged.v1.")
    return f"[{name}](#{name.lower().replace('.', '')})" if name != type_name else type_name.removeprefix(".")

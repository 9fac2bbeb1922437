"""JSON as this API speaks it: non-finite numbers are `"nan"`, `"inf"`, `"-inf"`; times are epoch seconds and ISO 8601.

Standard JSON has no NaN, and here NaN is a finding: it must reach the reader, never become null or break a parser.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, PlainSerializer, WithJsonSchema, model_serializer
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

_ENCODER = msgspec.json.Encoder()


def spell(value: float) -> float | str:
    """The number itself, or the word for a non-finite one."""
    if math.isfinite(value):
        return value
    return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")


def finite(value: Any) -> Any:
    """`value` with every non-finite float inside spelled out; containers are copied, the rest is kept."""
    if isinstance(value, float):
        return spell(value)
    if isinstance(value, dict):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return value


def iso(at: float | None) -> str | None:
    """Epoch seconds as ISO 8601 in UTC; None for none, and for a clock too absurd to be a date."""
    if at is None or not math.isfinite(at):
        return None
    try:
        return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    except (OverflowError, ValueError, OSError):
        return None


def to_json(value: Any) -> bytes:
    """Compact JSON of plain data. Non-finite numbers are spelled out."""
    try:
        # A non-finite number would show as a null: where there is none, nothing needs to be copied.
        words = _ENCODER.encode(value)
        if b"null" not in words:
            return words
    except (TypeError, ValueError):
        pass
    return _ENCODER.encode(finite(value))


def spelled_to_json(value: Any) -> bytes:
    """`to_json` of data, msgspec structs included, in which every non-finite number is spelled already."""
    return _ENCODER.encode(value)


class FiniteJSON(JSONResponse):
    """The default response: the last guard against a non-finite number in JSON."""

    def render(self, content: Any) -> bytes:
        return to_json(content)


_NUMBER_SCHEMA = {"anyOf": [{"type": "number"}, {"type": "string", "enum": ["nan", "inf", "-inf"]}]}
Number = Annotated[float, PlainSerializer(spell), WithJsonSchema(_NUMBER_SCHEMA, mode="serialization")]
"""A float that may be non-finite."""
Plain = Annotated[Any, PlainSerializer(finite), WithJsonSchema({}, mode="serialization")]
"""Free JSON."""
Object = Annotated[dict[str, Any], PlainSerializer(finite), WithJsonSchema({"type": "object"}, mode="serialization")]
"""A free JSON object."""


def _is_time(name: str) -> bool:
    return name == "at" or name.endswith("_at")


class Body(BaseModel):
    """Base of every answer. A field `at` or `<x>_at` in epoch seconds has its `…_iso` beside it."""

    model_config = ConfigDict(from_attributes=True, frozen=True)

    @model_serializer(mode="wrap")
    def _with_iso(self, handler):  # type: ignore[no-untyped-def]  # an annotation would replace the schema
        data = handler(self)
        times = {f"{k}_iso": iso(v) for k, v in data.items() if _is_time(k)}
        return {**data, **times}

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = handler(core)
        properties = handler.resolve_ref_schema(schema).get("properties", {})
        for name in [n for n in properties if _is_time(n)]:
            properties[f"{name}_iso"] = {"anyOf": [{"type": "string", "format": "date-time"}, {"type": "null"}]}
        return schema

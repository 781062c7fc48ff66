"""What all bodies that clients send are made of."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

from jdserve.core.request import MAX_SEED


def _encodable(value: str) -> str:
    # JSON can spell half of a surrogate pair, which no tokenizer takes.
    try:
        value.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError("string_unicode", "Input should be valid Unicode text") from None
    return value


Text = Annotated[str, AfterValidator(_encodable)]
Int = Annotated[int, Field(ge=-MAX_SEED - 1, le=MAX_SEED)]


class Body(BaseModel):
    """Base of all bodies: no conversion between types, no unknown field."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

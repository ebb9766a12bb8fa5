"""Types of setting values that need more than a range: parsing and error messages."""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator
from pydantic_core import PydanticCustomError

from ssd_serve.base.attention_backends import AUTO, names
from ssd_serve.base.cluster_key import STRONG_KEY, is_weak
from ssd_serve.base.engine_config import NO_DRAFT

_DTYPES = {"float32": "fp32", "float": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16"}


def _origins(value: str) -> str:
    origins = [origin.strip().lower() for origin in value.split(",")]
    for origin in origins:
        if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s?#]+", origin):
            raise PydanticCustomError(
                "origin",
                "'{origin}' is no origin; write e.g. https://app.example.org, or * for all",
                {"origin": origin},
            )
    return ",".join(origins)


def _hosts(value: str) -> str:
    hosts = [host.strip().strip("[]").lower() for host in value.split(",")]
    for host in hosts:
        if host != "*" and not re.fullmatch(r"[a-z0-9_.-]+|[0-9a-f:.]*:[0-9a-f:.]*:[0-9a-f:.]*", host):
            raise PydanticCustomError(
                "host", "'{host}' is no host name; write e.g. llm.example.org, or * for all", {"host": host}
            )
    return ",".join(hosts)


def _root_path(value: str) -> str:
    if not re.fullmatch(r"(/[^/\s?#]+)+", value):
        raise PydanticCustomError("root_path", "must begin with / and not end with it, e.g. /llm")
    return value


def _key(value: str) -> str:
    """Files that keys come from end with a newline."""
    key = value.strip()
    if not key:
        raise PydanticCustomError("empty_key", "is empty; openssl rand -hex 32 makes a key")
    return key


def _cluster_key(value: str) -> str:
    key = _key(value)
    if is_weak(key):
        raise PydanticCustomError("cluster_key", "must be {strong}", {"strong": STRONG_KEY})
    return key


def _layers(value: str) -> str:
    if not re.fullmatch(r"(\d+|final)(,(\d+|final))*", value.replace(" ", "")):
        raise PydanticCustomError(
            "layers", "must be numbers with commas between, such as 1,15,28, and final for EAGLE-1"
        )
    return value.replace(" ", "")


def _drafts(value: str) -> str:
    names = [name.strip() for name in value.split(",")]
    if NO_DRAFT in names and any(name not in (NO_DRAFT, "") for name in names):
        raise PydanticCustomError("drafts", "'none' stands alone: leave it out, or the others")
    return value


def _tree_attention(value: str) -> str:
    *others, last = (repr(name) for name in (AUTO, *names()))
    if value not in (AUTO, *names()):
        raise PydanticCustomError(
            "backend", "Input should be {backends}", {"backends": f"{', '.join(others)} or {last}"}
        )
    return value


def _dtype(value: object) -> object:
    """Also by the names that PyTorch and vLLM have."""
    return _DTYPES.get(value, value) if isinstance(value, str) else value


DType = Annotated[Literal["auto", "fp32", "bf16", "fp16", "int8"], BeforeValidator(_dtype)]
Origins = Annotated[str, AfterValidator(_origins)]
Hosts = Annotated[str, AfterValidator(_hosts)]
RootPath = Annotated[str, AfterValidator(_root_path)]
Key = Annotated[str, AfterValidator(_key)]
ClusterKey = Annotated[str, AfterValidator(_cluster_key)]
Layers = Annotated[str, AfterValidator(_layers)]
Drafts = Annotated[str, AfterValidator(_drafts)]
TreeAttention = Annotated[str, AfterValidator(_tree_attention)]

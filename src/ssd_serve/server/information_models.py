"""What the server answers of itself, as the OpenAPI document describes it; see `openai.answer_models`."""

from typing import Annotated, Literal

from pydantic import Field

# pydantic wants this one before Python 3.12, and `NotRequired` is not in `typing` before 3.11.
from typing_extensions import NotRequired, TypedDict

from ssd_serve.base.messages import DecisionReason


class Health(TypedDict):
    """The server can generate tokens."""

    status: Literal["ok"]
    model: str
    mode: str | None


class ModelCard(TypedDict):
    """A served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    revision: Annotated[
        str | None, Field(description="the commit of the hub's repository that was asked for")
    ]
    max_model_len: Annotated[int | None, Field(description="null until the model is loaded")]
    draft: Annotated[str | None, Field(description="what drafts for it; null until the model is loaded")]
    default_sampling_params: Annotated[
        dict[str, float] | None,
        Field(description="what the model asks for where a request leaves it out; null until it is loaded"),
    ]


class ModelList(TypedDict):
    """All served models."""

    object: Literal["list"]
    data: list[ModelCard]


class ServerInfo(TypedDict):
    """What serves; null until it is known."""

    version: str
    model: str
    target: str | None
    draft: str | None
    mode: str | None
    target_device: str | None
    draft_device: str | None
    vocabulary: int | None
    slots: Annotated[int | None, Field(description="tokens that the KV cache holds")]
    max_model_len: int | None
    tree_decode_backend: str | None
    layout: Annotated[str | None, Field(description="how it speculates now")]
    drafters: int | None
    settings: Annotated[
        dict[str, object],
        Field(
            description="those that are not the usual ones; of those that do not say how it generates: 'set'"
        ),
    ]


class Version(TypedDict):
    """Of the package."""

    version: str


class RoundPrice(TypedDict):
    """What a round should give."""

    nodes: Annotated[
        int | None,
        Field(description="drafted tokens to verify; null: none are there to be counted"),
    ]
    seconds: float
    tokens_per_second: float


class RoundDecision(TypedDict):
    """What the last round decided about drafts, and why."""

    layout: Annotated[Literal["async", "sync", "off"], Field(description="how it speculates")]
    why: DecisionReason
    nodes: Annotated[int, Field(ge=0, description="drafted tokens that were verified")]
    waited_s: Annotated[float, Field(ge=0, description="how long the round waited for drafts")]
    chosen: Annotated[RoundPrice | None, Field(description="the round as it was chosen; null: unknown")]
    other: Annotated[
        RoundPrice | None, Field(description="without drafts where there were some, else with; null: unknown")
    ]


class Load(TypedDict):
    """Requests in flight."""

    server_load: Annotated[int, Field(ge=0)]
    speculation: NotRequired[Annotated[RoundDecision, Field(description="absent before the first round")]]

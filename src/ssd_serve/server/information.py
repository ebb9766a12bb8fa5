"""GET endpoints: health, models, version, load, server information and metrics."""

import json
from dataclasses import dataclass
from typing import Annotated, Literal

from fastapi import Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import Field

# pydantic needs this one before Python 3.12, and `NotRequired` is not in `typing` before 3.11.
from typing_extensions import NotRequired, TypedDict

from ssd_serve.base.engine_settings import EngineSettings
from ssd_serve.base.messages import CostEstimate, DecisionMessage, DecisionReason
from ssd_serve.base.names import hub_id
from ssd_serve.base.settings import Settings
from ssd_serve.base.version import __version__
from ssd_serve.server.service import Service

_ENGINE_FIELDS = ("target", "draft", "mode", "target_device", "draft_device", "vocabulary", "slots")
_SHOWN_SETTINGS = EngineSettings.model_fields.keys() - {"cache_dir", "drafter_address", "models_file"}
"""Settings that /server_info shows: no secrets, no paths or addresses of the operator."""


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
    revision: Annotated[str | None, Field(description="the requested commit of the hub's repository")]
    max_model_len: Annotated[int | None, Field(description="null until the model is loaded")]
    draft: Annotated[str | None, Field(description="the draft model; null until the model is loaded")]
    default_sampling_params: Annotated[
        dict[str, float] | None,
        Field(
            description="the model's defaults for fields that a request leaves out; null until it is loaded"
        ),
    ]


class ModelList(TypedDict):
    """List of the one served model."""

    object: Literal["list"]
    data: list[ModelCard]


class ServerInfo(TypedDict):
    """The model, its devices and settings; fields are null until known."""

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
    layout: Annotated[str | None, Field(description="current decoding mode: async, sync or off")]
    drafters: int | None
    settings: Annotated[
        dict[str, object],
        Field(description="settings that are not the default; 'set' for those that do not change generation"),
    ]


class Version(TypedDict):
    """The version of the package."""

    version: str


class RoundPrice(TypedDict):
    """Estimate of a round."""

    nodes: Annotated[
        int | None,
        Field(description="draft tokens to verify; null: unknown"),
    ]
    seconds: float
    tokens_per_second: float


class RoundDecision(TypedDict):
    """Decision of the last round about drafts, and its reason."""

    layout: Annotated[Literal["async", "sync", "off"], Field(description="decoding mode")]
    why: DecisionReason
    nodes: Annotated[int, Field(ge=0, description="draft tokens that were verified")]
    waited_s: Annotated[float, Field(ge=0, description="time that the round waited for drafts")]
    chosen: Annotated[RoundPrice | None, Field(description="estimate of the chosen round; null: unknown")]
    other: Annotated[
        RoundPrice | None,
        Field(description="estimate without drafts if the round had some, else with drafts; null: unknown"),
    ]


class Load(TypedDict):
    """Requests in flight."""

    server_load: Annotated[int, Field(ge=0)]
    machine_busy: Annotated[bool, Field(description="other programs take cores that the target needs")]
    other_cores: Annotated[
        float, Field(ge=0, description="cores that they use; 0 if the machine is not busy")
    ]
    speculation: NotRequired[Annotated[RoundDecision, Field(description="absent before the first round")]]


@dataclass(frozen=True, slots=True)
class InformationEndpoints:
    """Handlers of GET routes."""

    service: Service

    async def health(self) -> Response:
        """Return 200 if a token can be generated, else 503 with the reason."""
        problem = self.service.problem()
        if problem is not None:
            return problem.response()
        ready = self.service.engine.ready
        return JSONResponse(
            {"status": "ok", "model": self.service.model, "mode": ready.mode if ready else None}
        )

    async def models(self) -> Response:
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def model(self, name: str) -> Response:
        self.service.require_model(name)
        return JSONResponse(self._card())

    async def version(self) -> Response:
        return JSONResponse({"version": __version__})

    async def load(self) -> Response:
        """Return requests in flight, for load balancers, and the last decision about drafts."""
        engine, status = self.service.engine, self.service.engine.status
        machine: dict[str, object] = {"machine_busy": False, "other_cores": 0.0}
        if status is not None:
            machine = {"machine_busy": status.machine_busy, "other_cores": status.other_cores}
        decided = status.decision if status is not None else None
        more = {"speculation": _speculation(decided)} if decided is not None else {}
        return JSONResponse({"server_load": engine.active, **machine, **more})

    async def server_info(self) -> Response:
        """Return the model, its devices, and non-default settings; the values of secrets and paths are hidden."""
        service, ready = self.service, self.service.engine.ready
        status = service.engine.status
        found: dict[str, object] = {
            "version": __version__,
            "model": service.model,
            **{name: getattr(ready, name, None) for name in _ENGINE_FIELDS},
            "max_model_len": ready.context if ready else None,
            "tree_decode_backend": status.attention if status else None,
            "layout": status.layout if status else None,
            "drafters": status.drafters_alive if status else None,
            "settings": _changed(service.settings),
        }
        return JSONResponse(found)

    async def metrics(self) -> Response:
        """Return the Prometheus page, joined with those of the other replicas."""
        joined = self.service.metrics_page
        page = await joined() if joined is not None else self.service.metrics.render()
        return Response(page, media_type=CONTENT_TYPE_LATEST)

    def _card(self) -> dict[str, object]:
        ready = self.service.engine.ready
        found = hub_id(self.service.engine.target or self.service.settings.target)
        return {
            "id": self.service.model,
            "object": "model",
            "created": self.service.created,
            "owned_by": "ssd-serve",
            "root": found.name if found else self.service.settings.target,
            "revision": found.commit if found else None,
            "max_model_len": ready.context if ready else None,
            "draft": ready.draft if ready else None,
            "default_sampling_params": ready.sampling if ready else None,
        }


def _changed(settings: Settings) -> dict[str, object]:
    changed: dict[str, object] = json.loads(settings.model_dump_json(exclude_defaults=True))
    return {name: value if name in _SHOWN_SETTINGS else "set" for name, value in changed.items()}


def _speculation(decided: DecisionMessage) -> dict[str, object]:
    return {
        "layout": decided.layout,
        "why": decided.why.value,
        "nodes": decided.nodes,
        "waited_s": decided.waited_s,
        "chosen": _price(decided.chosen),
        "other": _price(decided.other),
    }


def _price(price: CostEstimate | None) -> dict[str, object] | None:
    if price is None:
        return None
    return {"nodes": price.nodes, "seconds": price.seconds, "tokens_per_second": price.rate}

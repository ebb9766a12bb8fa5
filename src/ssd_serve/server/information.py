"""Endpoints that only tell something: health, models, version, load, metrics. All cheap."""

import json
from dataclasses import dataclass

from fastapi import Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST

from ssd_serve.base.version import __version__
from ssd_serve.base.engine_settings import EngineSettings
from ssd_serve.base.hub_id import hub_id
from ssd_serve.base.messages import DecisionMessage, CostEstimate
from ssd_serve.server.service import Service
from ssd_serve.base.settings import Settings

_OF_ENGINE = ("target", "draft", "mode", "target_device", "draft_device", "vocabulary", "slots")
_TOLD = EngineSettings.model_fields.keys() - {"cache_dir", "drafter_address"}
"""Settings whose values may be told: no secrets, no paths and addresses of the operator's."""


@dataclass(frozen=True, slots=True)
class InformationEndpoints:
    """Handlers of the routes."""

    service: Service

    async def health(self) -> Response:
        """200 when a token can be generated; else 503 with the reason."""
        trouble = self.service.trouble()
        if trouble is not None:
            return trouble.response()
        ready = self.service.engine.ready
        return JSONResponse(
            {"status": "ok", "model": self.service.model, "mode": ready.mode if ready else None}
        )

    async def models(self) -> Response:
        """The one model that is served."""
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def model(self, name: str) -> Response:
        """The card of a model."""
        self.service.require_model(name)
        return JSONResponse(self._card())

    async def version(self) -> Response:
        """The version of the package."""
        return JSONResponse({"version": __version__})

    async def load(self) -> Response:
        """Requests in flight, for load balancers, and why it speculates or not."""
        engine = self.service.engine
        decided = engine.status.decision if engine.status is not None else None
        more = {"speculation": _speculation(decided)} if decided is not None else {}
        return JSONResponse({"server_load": engine.active, **more})

    async def server_info(self) -> Response:
        """What serves, on what, and which settings are not the usual ones; of those that do not say how it
        generates only that they are set."""
        service, ready = self.service, self.service.engine.ready
        status = service.engine.status
        told: dict[str, object] = {
            "version": __version__,
            "model": service.model,
            **{name: getattr(ready, name, None) for name in _OF_ENGINE},
            "max_model_len": ready.context if ready else None,
            "tree_decode_backend": status.attention if status else None,
            "layout": status.layout if status else None,
            "drafters": status.drafters_alive if status else None,
            "settings": _changed(service.settings),
        }
        return JSONResponse(told)

    async def metrics(self) -> Response:
        """The Prometheus page; of all servers where there are several behind this address."""
        joined = self.service.metrics_page
        page = await joined() if joined is not None else self.service.metrics.render()
        return Response(page, media_type=CONTENT_TYPE_LATEST)

    def _card(self) -> dict[str, object]:
        ready = self.service.engine.ready
        target = self.service.engine.target or self.service.settings.target
        found = hub_id(target)
        return {
            "id": self.service.model,
            "object": "model",
            "created": self.service.created,
            "owned_by": "ssd-serve",
            "root": found.name if found else target,
            "revision": found.commit if found else None,
            "max_model_len": ready.context if ready else None,
            "draft": ready.draft if ready else None,
            "default_sampling_params": ready.sampling if ready else None,
        }


def _changed(settings: Settings) -> dict[str, object]:
    """The settings that are not the usual ones."""
    told: dict[str, object] = json.loads(settings.model_dump_json(exclude_defaults=True))
    return {name: value if name in _TOLD else "set" for name, value in told.items()}


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

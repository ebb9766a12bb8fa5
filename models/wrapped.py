"""A model that stands before another: its subclasses add something to forwards, facts are the other's."""

from ssd_serve.models.interface import Model, ModelFacts


class WrappedModel:
    """Stands before a model; what it does about forwards is added by others."""

    def __init__(self, model: Model) -> None:
        self._model = model

    @property
    def facts(self) -> ModelFacts:
        """Facts of the real model."""
        return self._model.facts

    @property
    def slots(self) -> int:
        """Slots of the real model."""
        return self._model.slots

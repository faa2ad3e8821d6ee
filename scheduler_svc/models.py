"""The models that are served, by name, and which executors may serve them."""

from collections.abc import Callable, Iterable, Iterator

import structlog

from paged.v1 import executor_pb2 as pb
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.driver import Driver
from scheduler_svc.errors import FieldViolation, InvalidRequest, ModelNotFound, Unavailable
from scheduler_svc.link.session import SessionLost
from scheduler_svc.served_model import ServedModel
from scheduler_svc.settings import SchedulerSettings

log = structlog.get_logger()


class Models:
    """`drivers` are those of all executors that are known; `new_waiting` makes a place for requests to wait."""

    def __init__(
        self, settings: SchedulerSettings, drivers: Iterable[Driver], new_waiting: Callable[[], Scheduler]
    ) -> None:
        self._settings = settings
        self._drivers = drivers
        self._new_waiting = new_waiting
        self._models: dict[str, ServedModel] = {}

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(list(self._models.values()))

    def named(self, name: str) -> ServedModel:
        """The model of that name, ready for requests; of the empty name the only one. Raises ModelNotFound,
        InvalidRequest where the empty name could mean several, and Unavailable."""
        ready = [model for model in self._models.values() if model.is_ready]
        if not ready:
            raise Unavailable("no executor has been attached yet, so no model is known; try again later")
        if not name:
            ready = [model for model in ready if model.executors] or ready
            if len(ready) > 1:
                found = f"is empty, and several models are served: {_listed(ready)}; name one"
                raise InvalidRequest(FieldViolation("model", found))
            return ready[0]
        model = self._models.get(name)
        if model is None:
            raise ModelNotFound(f"model {name[:128]!r} is not served here; there is {_listed(ready)}")
        if not model.is_ready:
            raise Unavailable(f"another {name!r} is taking over; try again later")
        return model

    def of(self, driver: Driver) -> ServedModel | None:
        """What its executor has served last."""
        return None if driver.attached is None else self._models.get(driver.attached.model.name)

    def refuse_or_replace(self, driver: Driver, attached: pb.Attached) -> ServedModel | None:
        """Whether the executor may be used. Returns the model that it puts an end to, if it does: of the same name, but
        other weights.

        Executors of one name must be equal. One that differs is not used while there are others, or while one that was
        lost may well come back; then it is, and so are those like it.

        Raises SessionLost.
        """
        name = attached.model.name
        model = self._models.get(name)
        if model is None:
            self._models[name] = ServedModel(
                attached, self._new_waiting(), self._settings.cache_dir, self._settings.max_model_len
            )
            return None
        difference = model.difference(attached)
        if not difference:
            return None
        if model.executors or self.expects(model, besides=driver):
            raise SessionLost(f"not used beside others of model {name!r}: {difference}", refused=True)
        log.warning("model_changed", model=name, difference=difference)
        is_other = model.facts.fingerprint != attached.model.fingerprint
        model.become(attached)
        return model if is_other else None

    def expects(self, model: ServedModel, besides: Driver | None = None) -> bool:
        """Whether an executor of the model that was lost may well come back."""
        return any(driver is not besides for driver in self.expected(model))

    def expected(self, model: ServedModel) -> Iterator[Driver]:
        """Those executors."""
        return (
            driver
            for driver in self._drivers
            if driver.is_found
            and not driver.is_attached
            and driver.lost_s <= self._settings.executor_wait_s
            and self._was(driver, model)
            and driver.attached is not None
            and not model.difference(driver.attached)
        )

    def forget(self, model: ServedModel) -> bool:
        """Do so, unless one of the executors that are known has served it last. Returns whether it was done."""
        if any(self._was(driver, model) for driver in self._drivers):
            return False
        del self._models[model.name]
        log.info("model_gone", model=model.name)
        return True

    def _was(self, driver: Driver, model: ServedModel) -> bool:
        return self.of(driver) is model


def _listed(models: list[ServedModel]) -> str:
    return ", ".join(sorted(repr(model.name) for model in models))

"""What models take of a node."""

from __future__ import annotations

import threading
from collections.abc import Callable

from edgevlm.apps.bundles.hub import hub_id
from edgevlm.apps.credentials import mask_credentials
from edgevlm.apps.planning.formulas import camera_bytes
from edgevlm.apps.planning.plan import PlanRequest, make_plan
from edgevlm.apps.serve.config import ServeConfig
from edgevlm.errors import UserError
from edgevlm.progress import Notify
from edgevlm.runtime.helper_process import call_in_helper
from edgevlm.runtime.settings import parse_budget

HUB_S = 30.0  # until the hub is asked again for a model that it did not give
RESOLVE = "edgevlm.apps.bundles.fetch:resolve_config"
NOTHING = (0, 0, 0.0)  # of a model that does not run here
Planned = tuple[int, int, float]  # bytes of a model, bytes of each camera, frames a second of all its cameras together


class ModelNeeds:
    """What models take here, by name, as far as it is known."""

    def __init__(self, config: Callable[[], ServeConfig], done: threading.Event, notify: Notify) -> None:
        self._config, self._done, self._notify = config, done, notify
        self.known: dict[str, Planned] = {}
        self._fetching: set[str] = set()

    def learn(self, model: str) -> None:
        """Plan a model; one of the hub later, since a download may take longer than a lease."""
        if hub_id(model) is None:
            self._know(model, self.plan(model))
        elif model not in self._fetching:
            self._fetching.add(model)
            threading.Thread(target=self._fetch, args=(model,), name="edgevlm-cluster-hub", daemon=True).start()

    def _fetch(self, model: str) -> None:
        """Ask until the hub gives the model; meanwhile it does not run here."""
        told = ""
        while not self._done.is_set():
            try:
                folder = str(call_in_helper(RESOLVE, model, progress=lambda *done: None, notify=self._notify))
            except UserError as error:
                if str(error) != told:
                    told = str(error)
                    self._notify(told)
                self._know(model, NOTHING)
                self._done.wait(HUB_S)
            else:
                return self._know(model, self.plan(folder))

    def _know(self, model: str, planned: Planned) -> None:
        self.known = {**self.known, model: planned}  # another thread may be sending the one before

    def plan(self, model: str) -> Planned:
        """What ``edgevlm plan`` predicts of a model that is here; NOTHING, with a notice, where it cannot run."""
        config = self._config()
        budget = None if config.budget is None else parse_budget(str(config.budget))
        try:
            plan = make_plan(PlanRequest(model, budget=budget, fps=config.fps, cameras=1))
        except UserError as error:
            self._notify(f"{mask_credentials(model)} does not run here: {error}")
            return NOTHING
        camera = camera_bytes(plan.roofline.model, plan.budget, plan.chunk, plan.roofline.kv)
        return max(0, plan.memory.total - camera), camera, plan.speed.prefill_fps

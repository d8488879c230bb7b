"""What models take of a node, and what of that its open cameras have reserved with Ray."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress

from edgevlm.apps.bundles.hub import hub_id
from edgevlm.apps.cluster.head import HeadAway
from edgevlm.apps.credentials import mask_credentials
from edgevlm.apps.planning.memory import camera_bytes
from edgevlm.apps.planning.plan import PlanRequest, make_plan
from edgevlm.apps.serve.config import ServeConfig
from edgevlm.errors import UserError
from edgevlm.progress import Notify
from edgevlm.runtime.helper_process import call_in_helper
from edgevlm.runtime.settings import parse_budget

MEMORY, TIME = "edgevlm_memory", "edgevlm_time"  # resources of a node: megabytes, and all its time is 1
HUB_S = 30.0  # until the hub is asked again for a model that it did not give
RESOLVE = "edgevlm.apps.bundles.fetch:resolve_config"
NOTHING = (0, 0, 0.0)  # of a model that does not run here
Planned = tuple[int, int, float]  # bytes of a model, bytes of each camera, frames a second of all its cameras together


class ModelNeeds:
    """What models take here, by name, as far as it is known.

    reserve, release: of Ray's resources by name; reserve raises HeadAway, and UserError where there is not enough.
    """

    def __init__(self, config: Callable[[], ServeConfig], done: threading.Event, notify: Notify) -> None:
        self._config, self._done, self._notify = config, done, notify
        self.known: dict[str, Planned] = {}
        self.reserve: Callable[[str, Mapping[str, float]], object] = lambda name, amounts: None
        self.release: Callable[[str], object] = lambda name: None
        self._reserved: dict[str, str] = {}  # models by the cameras that have reserved what they take
        self._fetching: set[str] = set()

    def learn(self, model: str) -> None:
        """Have it known; of the hub's models later, since a download may take longer than a lease."""
        if hub_id(model) is None:
            self._know(model, self.plan(model))
        elif model not in self._fetching:
            self._fetching.add(model)
            threading.Thread(target=self._fetch, args=(model,), name="edgevlm-cluster-hub", daemon=True).start()

    def _fetch(self, model: str) -> None:
        """Until the hub gives it; meanwhile it does not run here."""
        told = ""
        while not self._done.is_set():
            try:
                folder = self._resolve(model)
            except UserError as error:
                if str(error) != told:
                    told = str(error)
                    self._notify(told)
                self._know(model, NOTHING)
                self._done.wait(HUB_S)
            else:
                return self._know(model, self.plan(model, folder))

    def _know(self, model: str, planned: Planned) -> None:
        self.known = {**self.known, model: planned}  # another thread may be sending the one before

    def _resolve(self, model: str) -> str:
        if hub_id(model) is None:
            return model
        return str(call_in_helper(RESOLVE, model, progress=lambda *done: None, notify=self._notify))

    def plan(self, model: str, folder: str | None = None) -> Planned:
        """What ``edgevlm plan`` says of it. folder: where it is, if that is known. NOTHING, with a notice, if it cannot run."""
        config = self._config()
        budget = None if config.budget is None else parse_budget(str(config.budget))
        try:
            plan = make_plan(PlanRequest(folder or self._resolve(model), budget=budget, fps=config.fps, cameras=1))
        except UserError as error:
            self._notify(f"{mask_credentials(model)} does not run here: {error}")
            return NOTHING
        camera = camera_bytes(plan.roofline.model, plan.budget, plan.chunk, plan.roofline.kv)
        return max(0, plan.memory.total - camera), camera, plan.speed.prefill_fps

    def reserve_camera(self, name: str, model: str, fps: float) -> None:
        """Have Ray know what a camera takes, and a model's weights with its first, if it answers. Raises UserError."""
        if model not in self.known:  # the head knows it of an earlier process
            self._know(model, self.plan(model))
        weights, camera, rate = self.known[model]
        with suppress(HeadAway):
            if model not in self._reserved.values():
                self.reserve(f"model {model}", {MEMORY: weights // 1_000_000})
            self._reserved[name] = model
            self.reserve(name, {MEMORY: camera // 1_000_000, TIME: int(1e4 * fps / rate) / 1e4})

    def release_camera(self, name: str) -> None:
        """What a camera has reserved, and its model's weights with its last."""
        model = self._reserved.pop(name, None)
        self.release(name)
        if model is not None and model not in self._reserved.values():
            self.release(f"model {model}")

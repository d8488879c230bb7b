"""``edgevlm watch``: run one watch on one camera, without HTTP."""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pydantic import ValidationError

from edgevlm.apps.credentials import mask_credentials
from edgevlm.apps.names import program_id, short_hash
from edgevlm.apps.run.process import is_gone
from edgevlm.apps.serve.config import ServeConfig
from edgevlm.apps.serve.service import Service
from edgevlm.apps.sources import SourceOptions, comes_to_an_end
from edgevlm.apps.watches.events import WatchEvent
from edgevlm.apps.watches.sinks import Sink, Stdout
from edgevlm.apps.watches.watch import Watch
from edgevlm.errors import UserError, reason
from edgevlm.progress import progress, to_stderr, to_stderr_if_lost, to_stdout

LOOK_S = 0.2
NEVER_S = 86_400.0  # seconds between snapshots in a run without --state, which no later run resumes


class Lines(Sink):
    """A sink that prints each event as a line of text on standard output."""

    def send(self, event: WatchEvent, pictures: Sequence[bytes]) -> None:
        if event.state == "open":
            left, top, right, bottom = (100 * edge for edge in event.evidence[0]["box"])
            what = f"looked at {left:.0f}-{right:.0f} % from the left, {top:.0f}-{bottom:.0f} % from the top"
        else:
            what = f"after {event.time - event.opened:.1f} s"
        time_of_day = f"{datetime.fromtimestamp(event.time):%H:%M:%S}"
        to_stdout(f"{time_of_day}  {event.state:5}  {event.question}  ({event.probability:.2f}, {what})")


def checked_watch(settings: dict[str, Any]) -> Watch:
    """Make a watch from the command-line options that are not None. Raises a UserError that names the invalid option."""
    try:
        return Watch.model_validate({name: value for name, value in settings.items() if value is not None})
    except ValidationError as error:
        found = error.errors(include_url=False)[0]
        name = str(found["loc"][0]).replace("_", "-").replace("choices", "choice")
        option = "QUESTION" if name in ("question", "name") else f"--{name}"
        raise UserError(f"{option}: {reason(found['msg'])}") from None


def watch(config: ServeConfig, options: SourceOptions, as_json: bool, quiet: bool) -> None:
    """Watch the configuration's only camera until a signal arrives, a video file ends or stdout is closed. Raises UserError."""
    ((name, camera),) = config.cameras.items()
    with TemporaryDirectory(prefix="edgevlm-watch-") as folder:
        if config.state is None:
            every = NEVER_S if config.snapshots is None else config.state_every
            config = config.model_copy(update={"state": folder, "state_every": every})
            about = [platform.node(), mask_credentials(camera.source), *(watch.name for watch in config.watches)]
            program_id(Path(folder), short_hash(json.dumps(about)))  # keeps the program's id the same in every run
        sinks = {"stdout": Stdout() if as_json else Lines()}
        service = Service(config, to_stderr_if_lost if quiet else to_stderr, options, sinks)
        try:
            with progress("opening the camera"):
                service.open()
            if not quiet:
                to_stderr(f"watching {mask_credentials(camera.source)}; press ctrl-C to stop")
            while not is_gone(sys.stdout):
                time.sleep(LOOK_S)
                stream = service.streams[name]
                if stream.problem and comes_to_an_end(camera.address(), None):
                    if stream.problem != "the source has ended":
                        raise UserError(stream.problem)
                    break
        except KeyboardInterrupt:
            pass
        finally:
            service.close()

"""``edgevlm serve`` and ``edgevlm config``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from edgevlm.apps.commands.cli_options import (
    EncryptWith,
    Json,
    KeyFile,
    Snapshots,
    flag,
    lines,
    of_file,
    option,
    with_settings,
)  # fmt: skip
from edgevlm.apps.commands.lazy import plain_app
from edgevlm.apps.credentials import secret, state_key
from edgevlm.apps.settings import RunSettings
from edgevlm.packages import needed
from edgevlm.progress import progress, to_stderr

EPILOG = """
\b
Examples:
  edgevlm serve                                   serve the demo camera
  edgevlm serve --camera rtsp://HOST/PATH --model ORG/NAME
  edgevlm serve edgevlm.toml                      several cameras
  edgevlm serve --cluster head --key-file key     begin a cluster
  edgevlm ask "how many objects are there now?"   ask from another shell
"""


@with_settings(RunSettings, {None: ("model", "policy", "budget", "fps", "append", "encode", "threads")}, typed_only=True)
def serve(
    settings: dict[str, Any],
    config: Annotated[Path | None, typer.Argument(metavar="CONFIG", help="Serve what this edgevlm.toml says.")] = None,
    camera: Annotated[list[str] | None, option("[NAME=]SRC", "Watch this camera; may be given again.", "demo")] = None,
    host: Annotated[str | None, option("H", "Listen at this address.", "127.0.0.1")] = None,
    port: Annotated[int | None, option("P", "Listen at this port; 0: any.", "8000")] = None,
    key_file: KeyFile = None,
    cluster: Annotated[str | None, option("head|ADDRESS", "Begin a cluster, or join the one there.")] = None,
    state: Annotated[str | None, option("DIR", "Keep snapshots there.", "the user's state folder")] = None,
    state_key_file: EncryptWith = None,
    snapshots: Snapshots = None,
    assigned: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Set any key of edgevlm.toml; may be given again.", allow_from_autoenv=False
        ),
    ] = None,
    json: Json = False,
    quiet: Annotated[bool, flag("--quiet", "Write errors only.")] = False,
) -> None:
    """Serve cameras over HTTP, with a page.

    The page is at the address it prints. Programs ask with OpenAI's clients.
    """
    with progress("starting"):
        server = needed("edgevlm.apps.serve.run", "edgevlm serve", "serve")
        configuration = needed("edgevlm.apps.serve.config", "edgevlm serve", "serve")
    if config is None and not camera and Path("edgevlm.toml").is_file():
        to_stderr("edgevlm.toml is not read; to read it: edgevlm serve edgevlm.toml")
    typed = {
        **settings, "state": state, "snapshots": snapshots, "state_key": of_file(state_key_file),
        "server": {"host": host, "port": port, "key": of_file(key_file)}, "cluster": {"join": cluster},
    }  # fmt: skip

    def load() -> Any:
        return configuration.settings_of(config, camera, typed, assigned or lines("EDGEVLM_SERVE_SET"))

    join = needed("edgevlm.apps.cluster.member", "--cluster", "cluster").join if load().cluster.join else None
    server.serve(load, json, quiet, join)


def check(
    path: Annotated[Path, typer.Argument(metavar="CONFIG", help="Check this edgevlm.toml.")] = Path("edgevlm.toml"),
    json: Json = False,
) -> None:
    """Check a configuration, and open nothing."""
    from edgevlm.apps.run.output import wall_clock
    from edgevlm.apps.schemas import json_line

    config = needed("edgevlm.apps.serve.config", "edgevlm config check", "serve")
    sinks = needed("edgevlm.apps.watches.sinks", "edgevlm config check", "serve")
    settings = config.settings_of(path)
    for each in settings.cameras.values():
        secret(each.source)
    config.server_key(settings.server)
    state_key(settings.state_key)
    sinks.open_sinks(settings.sinks)
    if json:
        typer.echo(json_line("config", {"time": wall_clock(), "path": str(path), "cameras": [*settings.cameras]}))
    else:
        to_stderr(f"{path}: cameras: {', '.join(settings.cameras)}; nothing wrong")


config = plain_app({"check": check}, name="config", help="Check a server's configuration.")

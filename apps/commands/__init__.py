"""The commands of ``edgevlm``, as they are typed: options, and what runs them. One line each in the registry."""

from __future__ import annotations

from edgevlm.apps.commands.build import build
from edgevlm.apps.commands.bundles import bundles, export
from edgevlm.apps.commands.calibrate import calibrate
from edgevlm.apps.commands.lists import cameras, doctor, policies
from edgevlm.apps.commands.plan import plan
from edgevlm.apps.commands.power import power
from edgevlm.apps.commands.run import EXAMPLES, run

COMMANDS = (run, export, build, bundles, calibrate, plan, policies, cameras, doctor, power)  # in the order of --help
EPILOGS = {"run": EXAMPLES}

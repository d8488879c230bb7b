"""Calibration: measurements made once per model and written into its bundle.

The measurements are value norms for InfiniPot-V's windows, attention over token age for HERMES's layer classes, the agreement
of layers for PureKV's estimate, and the policy closest to full KV.
"""

from edgevlm.calib.layers import calibrate
from edgevlm.calib.trace import Clip
from edgevlm.calib.write import as_calibrated, check_writable, write_calibration

__all__ = ["Clip", "as_calibrated", "calibrate", "check_writable", "write_calibration"]

"""Measurements made once per model and written into its bundle.

Value norms for InfiniPot-V's windows, attention over age for HERMES's layer classes, agreement of layers for PureKV's estimate,
and the policy that is closest to full KV.
"""

from edgevlm.calib.layers import calibrate
from edgevlm.calib.trace import Clip
from edgevlm.calib.write import as_calibrated, check_writable, write_calibration

__all__ = ["Clip", "as_calibrated", "calibrate", "check_writable", "write_calibration"]

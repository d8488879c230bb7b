"""Calibration: measurements made once per model and written into its bundle.

The measurements set InfiniPot-V's windows, HERMES's layer classes and PureKV's CLIE layer, and choose the policy for ``auto``.
"""

from edgevlm.calib.layers import calibrate
from edgevlm.calib.trace import Clip
from edgevlm.calib.write import as_calibrated, check_writable, write_calibration

__all__ = ["Clip", "as_calibrated", "calibrate", "check_writable", "write_calibration"]

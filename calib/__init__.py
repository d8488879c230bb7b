"""Calibration: measurements made once per model and written into its bundle.

The measurements determine the windows of InfiniPot-V, the layer classes of HERMES, PureKV's CLIE layer and ``auto``'s policy.
"""

from edgevlm.calib.layers import calibrate
from edgevlm.calib.trace import Clip
from edgevlm.calib.write import as_calibrated, check_writable, write_calibration

__all__ = ["Clip", "as_calibrated", "calibrate", "check_writable", "write_calibration"]

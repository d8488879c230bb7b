"""What is measured once per model and written into its bundle.

Value norms for InfiniPot-V's windows, attention over age for HERMES's layer classes, agreement of layers for PureKV's estimate.
"""

from edgevlm.calib.measure import calibrate
from edgevlm.calib.observe import Clip
from edgevlm.calib.write import check_writable, write_calibration

__all__ = ["Clip", "calibrate", "check_writable", "write_calibration"]
